"""One request's answer: its prompts are opened as streams, and written as one object or as an event stream."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from actors.messages import Opened
from engine.errors import EngineDeadError
from engine.request import Delta, Usage

from ..openai.errors import timed_out
from ..openai.responses import Choice, Shape, add_usage
from ..openai.sse import events, raise_for
from .admission import Slots
from .merge import merge

Stream = AsyncGenerator[Opened | Delta, None]
"""What ``Session.stream`` gives for one prompt: ``Opened`` first, then deltas."""
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""A proxy on the way must not hold tokens back."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a request asks for, ready to be begun."""

    streams: Sequence[Stream]
    shape: Callable[[str], Awaitable[Shape]]
    """The response's shape, once it is known which model answers."""
    streaming: bool
    include_usage: bool
    timeout_s: float


class Answer(Response):
    """Begins its work only when it is sent, all in one place: so whatever ends it, also a client that hangs up (the
    task is then cancelled), gives the slots back and closes the streams, which cancels the sequences.
    """

    def __init__(self, work: Work, slots: Slots) -> None:
        super().__init__()
        self._work = work
        self._slots = slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises what keeps the request from being begun, before anything is sent."""
        deadline_s = asyncio.get_running_loop().time() + self._work.timeout_s
        async with AsyncExitStack() as stack:
            for stream in self._work.streams:
                stack.push_async_callback(stream.aclose)
            stack.enter_context(self._slots.take(len(self._work.streams)))
            response = await self._begin(deadline_s, stack)
            await response(scope, receive, send)

    async def _begin(self, deadline_s: float, stack: AsyncExitStack) -> Response:
        work = self._work
        try:
            async with asyncio.timeout_at(deadline_s):
                opened = [await _opened(stream) for stream in work.streams]
                shape = await work.shape(opened[0].model)
        except TimeoutError:
            raise timed_out(work.timeout_s) from None
        deltas = merge([_deltas(stream) for stream in work.streams], deadline_s, work.timeout_s)
        stack.push_async_callback(deltas.aclose)  # before the streams, which its readers may be waiting on
        if work.streaming:
            body = events(shape, deltas, len(opened), work.include_usage)
            return StreamingResponse(body, media_type="text/event-stream", headers=_STREAM_HEADERS)
        async with aclosing(deltas):
            choices, usage = await gather(deltas, len(opened))
        return JSONResponse(shape.response(choices, usage))


async def gather(deltas: AsyncGenerator[tuple[int, Delta]], count: int) -> tuple[list[Choice], Usage]:
    """All choices to their ends. Raises the HeliosError of one that failed."""
    choices = [Choice(index) for index in range(count)]
    usages: dict[int, Usage] = {}
    async for index, delta in deltas:
        raise_for(delta)
        choice = choices[index]
        choice.text += delta.text
        choice.tokens.extend(delta.tokens)
        choice.finish_reason = delta.finish_reason
        usages[index] = delta.usage
    if unfinished := [choice.index for choice in choices if choice.finish_reason is None]:
        raise EngineDeadError(f"choices {unfinished} ended without a finish reason; send the request again")
    return choices, add_usage(usages.values())


async def _opened(stream: Stream) -> Opened:
    first = await anext(stream)
    assert isinstance(first, Opened), "a session's stream begins with Opened"
    return first


async def _deltas(stream: Stream) -> AsyncGenerator[Delta]:
    async with aclosing(stream):
        async for item in stream:
            if isinstance(item, Delta):
                yield item
