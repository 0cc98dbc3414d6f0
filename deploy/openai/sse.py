"""Server-sent events: a request's deltas as the stream an OpenAI client reads.

Every stream ends in one of two ways: a ``finish_reason`` for each choice and ``data: [DONE]``, or an error event and
``data: [DONE]``. It never just stops.
"""

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from engine.errors import EngineDeadError, HeliosError
from engine.request import Delta, Usage

from .errors import reply_to
from .responses import Shape, add_usage, token_text

DONE = b"data: [DONE]\n\n"
_LOG = logging.getLogger(__name__)


def event(data: dict[str, Any]) -> bytes:
    """One event. ``json.dumps`` writes no line break, so one ``data:`` line holds it."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def events(
    shape: Shape, deltas: AsyncGenerator[tuple[int, Delta]], choices: int, include_usage: bool
) -> AsyncGenerator[bytes]:
    """The events of one response, from the deltas of all its choices, each with the index of its choice."""
    # With include_usage every other chunk says `"usage": null`, so a reader may rely on the key.
    extra = {"usage": None} if include_usage else {}
    usages: dict[int, Usage] = {}
    offsets = [0] * choices
    finished: set[int] = set()
    for chunk in shape.opening_chunks(choices):
        yield event(chunk | extra)
    try:
        # Closed here and now when the client hangs up, since that is what cancels the sequence; not when collected.
        async with aclosing(deltas):
            async for index, delta in deltas:
                raise_for(delta)
                usages[index] = delta.usage
                if delta.text or delta.finish_reason or (delta.tokens and shape.vocabulary):
                    yield event(
                        shape.chunk(index, delta.text, delta.tokens, offsets[index], delta.finish_reason) | extra
                    )
                if shape.vocabulary:
                    offsets[index] += sum(len(token_text(shape.vocabulary, token.id)) for token in delta.tokens)
                if delta.finish_reason:
                    finished.add(index)
        if len(finished) < choices:
            raise EngineDeadError("the stream ended without a finish reason; send the request again")
    except Exception as error:  # the status line is long gone: an event is the only way left to say it
        if not isinstance(error, HeliosError):
            _LOG.exception("a stream failed")
        yield event(reply_to(error).body())
    else:
        if include_usage:
            yield event(shape.usage_chunk(add_usage(usages.values())))
    yield DONE


def raise_for(delta: Delta) -> None:
    """Raise what a last delta reports, if it reports a failure. OpenAI has no finish reason for one."""
    if delta.finish_reason == "error":
        raise delta.error or EngineDeadError("the model failed without saying why; see the server's log")
    if delta.finish_reason == "cancelled":
        raise EngineDeadError("the request was cancelled by the server; send it again")
