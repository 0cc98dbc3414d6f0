"""The timeline of a real run: what was read and written when, and when the engine waited for it."""

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from ..storage.direct import Bounce
from ..storage.spill import SpillMemory
from ..storage.storage import Storage
from ..storage.transfer import WORKERS, Recipe, Threads, Transfer, Workers, WrappedPiece
from .simulator.clock import Busy

if TYPE_CHECKING:
    from ..device import Slot


class Recorder(Storage):
    """Storage that notes what it does, for a device, ``device.storage = Recorder()``, before a model is built."""

    def __init__(self) -> None:
        self._begun_s = time.perf_counter()
        self._lock = threading.Lock()
        self.timeline: list[Busy] = []

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._begun_s

    def restart(self) -> None:
        """Forget what was noted; second 0 is now."""
        with self._lock:
            self._begun_s = time.perf_counter()
            self.timeline = []

    def note(self, resource: str, start_s: float, what: str) -> None:
        """Something took from ``start_s`` until now."""
        with self._lock:
            self.timeline.append(Busy(resource, start_s, self.now_s, what))

    def workers(self, count: int = WORKERS) -> Workers:
        return _NotedThreads(count, self)


class _NotedThreads:
    """Threads whose pieces are noted, and how long the engine waits for them."""

    def __init__(self, count: int, recorder: Recorder) -> None:
        self._threads, self._recorder = Threads(count), recorder

    def begin(self, slot: "Slot", recipe: Recipe, store: bool) -> Transfer:
        noted = replace(recipe, pieces=[_NotedPiece(piece, store, self._recorder) for piece in recipe.pieces])
        return _NotedTransfer(self._threads.begin(slot, noted, store), self._recorder)

    def close(self) -> None:
        self._threads.close()


@dataclass(slots=True)
class _NotedPiece(WrappedPiece):
    store: bool
    recorder: Recorder

    def run(self, host: Tensor, bounce: Bounce) -> None:
        start_s = self.recorder.now_s
        self.piece.run(host, bounce)
        link = "host memory" if isinstance(self.place, SpillMemory) else "disk"
        self.recorder.note(f"{link} {'write' if self.store else 'read'}", start_s, "store" if self.store else "load")


@dataclass(frozen=True, slots=True)
class _NotedTransfer:
    transfer: Transfer
    recorder: Recorder

    @property
    def slot(self) -> "Slot":
        return self.transfer.slot

    @property
    def error(self) -> BaseException | None:
        return self.transfer.error

    @property
    def done(self) -> bool:
        return self.transfer.done

    def wait(self) -> None:
        start_s = self.recorder.now_s
        self.transfer.wait()
        self.recorder.note("waiting", start_s, "")
