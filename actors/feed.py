"""Feed: the streams that this process has open on one replica, their deltas fetched with one call at a time."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import EngineDeadError
from engine.request import Delta, SamplingParams

from .failures import ReplicaLostError, told_apart
from .messages import Opened
from .prompts import Prompt


@dataclass(slots=True)
class _Stream:
    epoch: int | None = None
    """The life of the replica it runs in; None before it was begun and after it was lost."""
    inbox: "asyncio.Queue[Delta | ReplicaLostError]" = field(default_factory=asyncio.Queue)


class Feed:
    """Begins streams on a replica and polls while there are any. Belongs to one event loop."""

    def __init__(self, handle: Any) -> None:
        """``handle`` is a model actor's."""
        self._handle = handle
        self._owner = uuid.uuid4().hex
        self._streams: dict[str, _Stream] = {}
        self._poll: asyncio.Task[None] | None = None

    async def begin(self, request_id: str, prompt: Prompt, params: SamplingParams, generated: Sequence[int]) -> Opened:
        """Begin a stream. Raises ReplicaLostError and whatever ``ModelActor.begin`` refuses it with.

        If this call is cancelled the sequence is too, as soon as it has begun.
        """
        stream = self._streams[request_id] = _Stream()  # its deltas may come before the answer to ``begin``
        call = asyncio.ensure_future(self._handle.begin.remote(self._owner, prompt, params, request_id, generated))
        try:
            opened: Opened = await asyncio.shield(call)
        except BaseException as error:
            del self._streams[request_id]
            call.add_done_callback(lambda _: self._cancel(request_id))
            if isinstance(error, Exception):
                raise told_apart(error) from None
            raise
        self._lose(lambda other: other.epoch is not None and other.epoch < opened.epoch, "the replica restarted")
        stream.epoch = opened.epoch
        if self._poll is None or self._poll.done():
            self._poll = asyncio.create_task(self._run())
        return opened

    async def next(self, request_id: str) -> Delta:
        """The stream's next delta. Raises ReplicaLostError when there will be none."""
        item = await self._streams[request_id].inbox.get()
        if isinstance(item, ReplicaLostError):
            raise item
        return item

    def leave(self, request_id: str, finished: bool) -> None:
        """Forget a stream, and cancel its sequence unless it is finished."""
        self._streams.pop(request_id, None)
        if not finished:
            self._cancel(request_id)

    def _cancel(self, request_id: str) -> None:
        self._handle.cancel.remote(request_id)

    async def _run(self) -> None:
        """Poll while there are streams, and then until the replica has nothing more of ours."""
        last = None
        while (epoch := self._epoch() or last) is not None:
            drained = self._epoch() is None
            try:
                deltas = await self._handle.poll.remote(self._owner, epoch)
            except Exception as error:  # whatever it is, the streams must not wait for ever
                self._lose(lambda stream: stream.epoch is not None, str(told_apart(error)))
                return
            for delta in deltas:
                self._pass_on(delta)
            last = None if drained and not deltas else epoch

    def _pass_on(self, delta: Delta) -> None:
        if stream := self._streams.get(delta.request_id):
            dead = isinstance(delta.error, EngineDeadError)
            stream.inbox.put_nowait(ReplicaLostError(str(delta.error)) if dead else delta)
        elif delta.finish_reason is None:  # nobody reads it, so nobody else will end it
            self._cancel(delta.request_id)

    def _epoch(self) -> int | None:
        """The replica's present life, as far as the streams know; None when there is none to poll for."""
        return max((stream.epoch for stream in self._streams.values() if stream.epoch is not None), default=None)

    def _lose(self, lost: Callable[[_Stream], bool], reason: str) -> None:
        for stream in self._streams.values():
            if lost(stream):
                stream.epoch = None
                stream.inbox.put_nowait(ReplicaLostError(reason))
