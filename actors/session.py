"""Session: how a process uses an app. Asks the router for a replica, opens streams there, resumes those that break."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from engine.errors import HeliosError, OverloadedError
from engine.request import Completion, Delta, Request
from router.core import AUTO

from .directory import Directory
from .failures import ReplicaLostError
from .feed import Feed
from .messages import Opened
from .prompts import Prompt, Sampling, sampling_params
from .stream import Ledger

PATIENCE_S = 10.0
"""How long a new request waits for a router or a replica that is away, as during a restart."""
RESUME_S = 60.0
"""How long a stream that was begun waits for a replica to go on with: a model takes its time to load."""
RETRY_S = 0.1
MAX_LOSSES = 5
"""Times a replica may die under one stream: a request that kills engines must not go on for ever."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a stream runs."""

    feed: Feed
    attempt: str
    opened: Opened


class Session:
    """Streams of one process over one app. Belongs to one event loop; Ray is connected already."""

    def __init__(self, app: str) -> None:
        self.directory = Directory(app)
        self._feeds: dict[tuple[str, int], Feed] = {}

    async def generate(
        self, prompt: Prompt, params: Sampling = None, *, model: str = AUTO, request_id: str | None = None
    ) -> tuple[Opened, Completion]:
        """Continue a prompt to its end. Raises as ``stream``, and what ended the request if that was an error."""
        opened, deltas = None, []
        async for message in self.stream(prompt, params, model=model, request_id=request_id):
            if isinstance(message, Opened):
                opened = message
            else:
                deltas.append(message)
        assert opened is not None, "a stream begins with Opened or raises"
        completion = Completion.gather(Request(opened.request_id, opened.prompt_ids), deltas)
        if completion.error:
            raise completion.error
        return opened, completion

    async def stream(
        self, prompt: Prompt, params: Sampling = None, *, model: str = AUTO, request_id: str | None = None
    ) -> AsyncGenerator[Opened | Delta, None]:
        """Continue a prompt: ``Opened`` with the prompt's token ids, then deltas, the last with a finish_reason.

        If the replica dies, another life or replica of the same model goes on from the tokens delivered; none is
        repeated or changed. When that does not succeed within ``RESUME_S``, or it happened more than ``MAX_LOSSES``
        times, the last delta has the finish_reason "error" and says why. Closing the generator cancels the sequence.

        Raises InvalidRequestError, ModelNotFoundError and OverloadedError before ``Opened``, nothing after it.
        """
        ledger = Ledger.begin(request_id or f"req-{uuid.uuid4().hex}", prompt, sampling_params(params))
        place = await self._open(ledger, model, PATIENCE_S)
        ledger.opened(place.opened.prompt_ids)
        finished = False
        try:
            yield place.opened
            while not finished:
                try:
                    delta = ledger.deliver(await place.feed.next(place.attempt))
                except ReplicaLostError as lost:
                    place = await self._resume(ledger, place, lost)
                    continue
                finished = delta.finish_reason is not None
                yield delta
        except HeliosError as error:
            yield ledger.end(error)
        finally:
            place.feed.leave(place.attempt, finished)

    async def _resume(self, ledger: Ledger, place: _Place, lost: ReplicaLostError) -> _Place:
        """Go on with a stream whose replica died. Raises HeliosError when that cannot be done."""
        at = place.opened
        place.feed.leave(place.attempt, finished=False)
        self._feeds.pop((at.model, at.replica), None)
        self.directory.failed(at.model, at.replica, at.epoch)
        ledger.losses += 1
        if ledger.losses > MAX_LOSSES:
            raise ReplicaLostError(f"{ledger.losses} replicas died under this request; the last: {lost}")
        return await self._open(ledger, at.model, RESUME_S)

    async def _open(self, ledger: Ledger, model: str, patience_s: float) -> _Place:
        """Find a replica and begin the stream there, waiting for one to come back if need be.

        A full queue refuses a new stream at once, but one that was begun waits for its turn.
        """
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                return await self._try_to_open(ledger, model)
            except (ReplicaLostError, OverloadedError) as error:
                full = isinstance(error, OverloadedError)
                if full and not ledger.losses:
                    raise
                if time.monotonic() >= deadline_s:
                    raise OverloadedError(
                        f"no replica of '{model}' took the request within {patience_s:g} s: {error}", retry_after_s=2.0
                    ) from None
            await asyncio.sleep(RETRY_S)

    async def _try_to_open(self, ledger: Ledger, model: str) -> _Place:
        decision = await self.directory.assign(model, ledger.request_id)
        key = (decision.model, decision.replica)
        if key not in self._feeds:
            self._feeds[key] = Feed(self.directory.model_actor(*key))
        feed, attempt = self._feeds[key], ledger.next_attempt()
        try:
            opened = await feed.begin(attempt, ledger.prompt, ledger.params, tuple(ledger.tokens))
        except ReplicaLostError:
            self._feeds.pop(key, None)
            raise
        return _Place(feed, attempt, opened)
