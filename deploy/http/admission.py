"""How much the service takes on: bytes of a body, and prompts at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from engine.errors import InvalidRequestError, OverloadedError

from ..openai.errors import BodyTooLargeError, EncodedBodyError
from ..openai.fields import shown

_RETRY_S = 1.0


class Slots:
    """Counts prompts from admission to their last token. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Hold ``count`` slots. Raises OverloadedError at once if they are not free; nothing ever waits here.

        Raises InvalidRequestError for more than there are, since no later time would be better.
        """
        if count > self.limit:
            raise InvalidRequestError(
                f"the request has {count} prompts and the server takes {self.limit} at once (http.max_queued); "
                "send fewer, or use `helios batch`",
                "prompt",
            )
        if self.taken + count > self.limit:
            raise OverloadedError(
                f"{self.taken} of {self.limit} places are taken (http.max_queued); try again later", _RETRY_S
            )
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The request's body. Raises BodyTooLargeError as soon as it is known to be too long, EncodedBodyError."""
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise EncodedBodyError(f"the body's Content-Encoding is {shown(encoding)}; send it as it is, uncompressed")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
    return bytes(body)


def _too_large(limit_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body is longer than {limit_bytes} bytes (http.max_body_bytes); send less, or raise the limit"
    )
