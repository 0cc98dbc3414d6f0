"""The Python client: ``helios.connect().generate("Hello")``, from any process that can reach the cluster."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from engine.errors import InvalidRequestError, ModelNotFoundError
from engine.request import Completion, Delta
from router.core import AUTO, Snapshot

from .lifecycle import list_apps
from .messages import ModelInfo, Opened
from .prompts import Message, Prompt, sampling_params
from .runtime import connect_ray
from .session import Session


def connect(address: str | None = None, app: str = "helios") -> "Client":
    """A client of a running app.

    Raises ConfigError when Ray cannot be reached, ModelNotFoundError when no app of that name runs there.
    """
    connect_ray(address)
    apps = list_apps()
    if app not in apps:
        running = ", ".join(apps) or "none"
        raise ModelNotFoundError(f"no app named '{app}' is running (running: {running}); start it with `helios serve`")
    return Client(app)


class Client:
    """Blocking calls on an app. Threads may share one; ``close`` ends it, as leaving a ``with`` block does."""

    def __init__(self, app: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="helios-client", daemon=True)
        self._thread.start()
        self._session = Session(app)

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = AUTO,
        **sampling: Any,
    ) -> Completion:
        """Continue a prompt, or answer a conversation. ``sampling`` are fields of SamplingParams.

        Raises InvalidRequestError, ModelNotFoundError, OverloadedError.
        """
        given = _prompt(prompt, messages)
        completion: Completion
        _, completion = self._wait(self._session.generate(given, sampling_params(sampling), model=model))
        return completion

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        model: str = AUTO,
        **sampling: Any,
    ) -> Iterator[Delta]:
        """As ``generate``, delta by delta. Closing the iterator cancels the request."""
        given = _prompt(prompt, messages)
        return self._deltas(self._session.stream(given, sampling_params(sampling), model=model))

    def models(self) -> list[ModelInfo]:
        """The app's models, one entry for each replica."""
        models: list[ModelInfo] = self._wait(self._models())
        return models

    def status(self) -> Snapshot:
        """What the router knows: which replicas are ready, how busy they are, how each model has done."""
        snapshot: Snapshot = self._wait(self._session.directory.snapshot())
        return snapshot

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _deltas(self, stream: AsyncGenerator[Opened | Delta, None]) -> Iterator[Delta]:
        try:
            while True:
                message = self._wait(anext(stream, None))
                if message is None:
                    return
                if isinstance(message, Delta):
                    yield message
        finally:
            self._wait(stream.aclose())

    async def _models(self) -> list[ModelInfo]:
        directory = self._session.directory
        return list(await asyncio.gather(*(directory.info(*replica) for replica in await directory.replicas())))

    def _wait(self, work: Any) -> Any:
        """Run ``work`` on the client's loop. Interrupting the wait cancels it."""
        future = asyncio.run_coroutine_threadsafe(_coroutine(work), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _coroutine(work: Any) -> Any:
    return await work


def _prompt(prompt: str | Sequence[int] | None, messages: Sequence[Message] | None) -> Prompt:
    if (prompt is None) == (messages is None):
        raise InvalidRequestError("give either prompt=... or messages=[...], and not both", "prompt")
    given = prompt if prompt is not None else messages
    assert given is not None, "one of them was given"
    return given
