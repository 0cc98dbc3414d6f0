"""EngineLoop: an engine on a thread of its own, for callers on other threads and event loops."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from .engine import Engine, EngineStats
from .errors import EngineDeadError, HeliosError, InvalidRequestError, OverloadedError
from .request import Deliver, Request
from .sequence import Sequence
from .transition import Transition

log = logging.getLogger(__name__)


class _Change:
    """A change of depth that is being loaded in the background."""

    def __init__(self, transition: Transition, future: "Future[int]", notify: Callable[[], None]) -> None:
        self.transition, self.future = transition, future
        self.error: BaseException | None = None
        self.done = False
        self._notify = notify
        self._thread = threading.Thread(target=self._load, name="helios-depth", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _load(self) -> None:
        try:
            self.transition.load()
        except BaseException as error:
            self.error = error
        self.done = True
        self._notify()


class EngineLoop:
    """Runs sweeps while there is work. Requests, cancellations and changes of depth take effect between two sweeps.

    ``deliver`` callbacks run on the engine's thread and must not block. After an internal fault every request ends
    with the reason, ``alive`` is False and ``error`` says why.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: HeliosError | None = None
        self._inbox: deque[Sequence] = deque()
        self._cancelled: deque[str] = deque()
        self._orders: deque[tuple[int | None, Future[int]]] = deque()
        """Depths to serve with; 0 is none."""
        self._change: _Change | None = None
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

    def change_depth(self, depth: int | None) -> "Future[int]":
        """Serve with another depth, None for the whole model; what is lacking is read while requests go on.

        The future has the depth once it serves. Otherwise it raises what ``Engine.change_depth`` does, and all is as
        before. Changes are made one after the other.
        """
        return self._order(depth)

    def park(self) -> "Future[int]":
        """Give weights and KV back; requests wait until ``change_depth``."""
        return self._order(0)

    def _order(self, depth: int | None) -> "Future[int]":
        future: Future[int] = Future()
        with self._condition:
            if self.error or self._closing:
                raise EngineDeadError(str(self.error or "the engine is shutting down; try another replica"))
            self._orders.append((depth, future))
            self._condition.notify()
        return future

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
                self._advance()
                self.engine.step()
        except Exception as fault:
            log.exception("the engine stopped on an internal fault")
            self._die(EngineDeadError(f"the engine stopped on an internal fault: {type(fault).__name__}: {fault}"))
        finally:
            self._abandon()

    def _advance(self) -> None:
        """Take the change that is under way a step further, or begin the next one."""
        change = self._change
        if change is not None and change.done:
            if change.error is None:
                self.engine.commit(change.transition)
                change.future.set_result(self.engine.depth)
            else:
                self.engine.roll_back(change.transition)
                change.future.set_exception(change.error)
            self._change = None
        while self._change is None and self._orders:
            depth, future = self._orders.popleft()
            if not future.set_running_or_notify_cancel():
                continue  # nobody wants it any more
            try:
                if depth == 0:
                    self.engine.park()
                elif not self.engine.serves(depth):
                    self._change = _Change(self.engine.begin_change(depth), future, self._notify)
                    return
            except HeliosError as error:
                future.set_exception(error)
            else:
                future.set_result(self.engine.depth)

    def _abandon(self) -> None:
        """Nothing changes any more: say so to whoever waits for it."""
        error = self.error or EngineDeadError("the engine was shut down before its depth was changed")
        if self._change is not None:
            self._change.join()
            self._change.future.set_exception(error)
        for _, future in self._orders:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _notify(self) -> None:
        with self._condition:
            self._condition.notify()

    @property
    def _due(self) -> bool:
        """Whether a change of depth can be begun or ended."""
        return bool(self._orders) if self._change is None else self._change.done

    def _take_orders(self) -> bool:
        """Wait for work and take in what was asked since the last sweep; False when it is time to stop."""
        with self._condition:
            while not (self._inbox or self._cancelled or self._due or self.engine.runs or self._closing):
                self._condition.wait()
            while self._inbox:
                self.engine.add(self._inbox.popleft())
            while self._cancelled:
                self.engine.cancel(self._cancelled.popleft())
            closing = self._closing
        if closing and (not self.engine.runs or time.monotonic() >= self._deadline):
            self.engine.fail_all(EngineDeadError("the engine was shut down before the request was finished"))
            return False
        return True

    def _die(self, error: HeliosError) -> None:
        with self._condition:
            self.error = error
            while self._inbox:
                self.engine.add(self._inbox.popleft())
        self.engine.fail_all(error)
