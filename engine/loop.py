"""EngineLoop: an engine on a thread of its own, for callers on other threads and event loops."""

import logging
import threading
import time
from collections import deque

from .engine import Engine, EngineStats
from .errors import EngineDeadError, HeliosError, InvalidRequestError, OverloadedError
from .request import Deliver, Request
from .sequence import Sequence

log = logging.getLogger(__name__)


class EngineLoop:
    """Runs sweeps while there is work. Requests and cancellations take effect between two sweeps.

    ``deliver`` callbacks run on the engine's thread and must not block. After an internal fault every request ends
    with the reason, ``alive`` is False and ``error`` says why.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: HeliosError | None = None
        self._inbox: deque[Sequence] = deque()
        self._cancelled: deque[str] = deque()
        self._condition = threading.Condition()
        self._closing = False
        self._deadline = 0.0
        self._thread = threading.Thread(target=self._run, name="helios-engine", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.error is None

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Queue a request. Its deltas go to ``deliver``; the last one has a finish_reason.

        Raises InvalidRequestError, OverloadedError when ``max_queued`` requests wait, EngineDeadError.
        """
        sequence = self.engine.prepare(request, deliver)
        request_id = request.request_id
        limit = self.engine.config.max_queued
        with self._condition:
            if self.error or self._closing:
                raise EngineDeadError(str(self.error or "the engine is shutting down; try another replica"))
            if self.engine.has(request_id) or any(s.request.request_id == request_id for s in self._inbox):
                raise InvalidRequestError(f"request id '{request_id}' is in use; choose another", "request_id")
            waiting = len(self._inbox) + self.engine.waiting
            idle = self.engine.config.max_sequences - self.stats().running
            if waiting >= limit + max(idle, 0):
                raise OverloadedError(f"{waiting} requests wait already and the limit is {limit}; try again later")
            self._inbox.append(sequence)
            self._condition.notify()

    def cancel(self, request_id: str) -> None:
        """End a request before the next sweep; a last delta with finish_reason "cancelled" follows."""
        with self._condition:
            self._cancelled.append(request_id)
            self._condition.notify()

    def stats(self) -> EngineStats:
        """The engine's counters: all that was delivered is in them."""
        return self.engine.stats()

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let those begun finish for up to ``drain_s`` seconds, cancel the rest, and stop."""
        with self._condition:
            self._closing = True
            self._deadline = time.monotonic() + drain_s
            self._condition.notify()
        self._thread.join()
        self.engine.close()

    def _run(self) -> None:
        try:
            while self._take_orders():
                self.engine.step()
        except Exception as fault:
            log.exception("the engine stopped on an internal fault")
            self._die(EngineDeadError(f"the engine stopped on an internal fault: {type(fault).__name__}: {fault}"))

    def _take_orders(self) -> bool:
        """Wait for work and take in what was asked since the last sweep; False when it is time to stop."""
        with self._condition:
            while not (self._inbox or self._cancelled or self.engine.has_work or self._closing):
                self._condition.wait()
            while self._inbox:
                self.engine.add(self._inbox.popleft())
            while self._cancelled:
                self.engine.cancel(self._cancelled.popleft())
            closing = self._closing
        if closing and (not self.engine.has_work or time.monotonic() >= self._deadline):
            self.engine.fail_all(EngineDeadError("the engine was shut down before the request was finished"))
            return False
        return True

    def _die(self, error: HeliosError) -> None:
        with self._condition:
            self.error = error
            while self._inbox:
                self.engine.add(self._inbox.popleft())
        self.engine.fail_all(error)
