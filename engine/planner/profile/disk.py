"""The disk as weights and KV use it: a ring's threads move pieces between slots and a file, past the page cache."""

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...config import format_bytes
from ...device import Device
from ...errors import ConfigError
from ...storage.direct import ALIGN, PIECE_BYTES
from ...storage.ring import Ring
from ...storage.spill import BlockPiece, SpillFile
from ...storage.transfer import Recipe, Threads
from .identity import existing
from .timing import Run

SLOTS = 3
LOOKUPS = 256
"""Small reads, of which the mean is taken."""
RUNS, TURN_S = 5, 0.4
"""Least number of runs, and seconds, of products alone or beside reading."""
SMALL_PIECE = 2**18
PIECES = 4
"""Of a slot, which is then as large as a small layer."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Rates are bytes a second, sustained: over all passes through the file."""

    free_bytes: int
    read: float
    write: float
    read_cpu_s: float
    """Seconds by which reading a byte delays the products beside it."""
    direct: bool
    """Past the page cache; not every file system can."""
    latency_s: float
    """Of a read of one block, one after another."""
    piece_s: float
    """What a small piece takes beside its bytes."""


def measure_disk(directory: Path, n_bytes: int, passes: int, device: Device, work: Run) -> Disk:
    """Write and read a file of ``n_bytes`` without a name, which leaves nothing behind however this ends; and read it
    beside ``work``, which computes as a model does.

    Raises ConfigError if there is no room for it, HeliosError if the directory cannot be written to.
    """
    free = _require_room(directory, n_bytes)
    bench = _Bench(directory, n_bytes, device)
    try:
        write_s = read_s = small_s = 0.0
        for _ in range(passes):
            write_s += bench.write()
            read_s += bench.read()
            small_s += bench.read(SMALL_PIECE)
        total = bench.n_bytes * passes
        delay_s = bench.delay_s(work, passes)
        piece_s = max(0.0, small_s - read_s) / (total / SMALL_PIECE) / (1 - SMALL_PIECE / PIECE_BYTES)
        return Disk(free, total / read_s, total / write_s, delay_s, bench.direct, bench.latency_s(), piece_s)
    finally:
        bench.close()


def _require_room(directory: Path, n_bytes: int) -> int:
    free = shutil.disk_usage(existing(directory)).free
    if free < n_bytes:
        raise ConfigError(
            f"measuring the disk takes a file of {format_bytes(n_bytes)} and {directory} has {format_bytes(free)} "
            "left; free space, choose another offload_dir, or measure quickly, which takes a smaller file"
        )
    return free


class _Bench:
    """A file, and passes over the whole of it."""

    def __init__(self, directory: Path, n_bytes: int, device: Device) -> None:
        slot_bytes = PIECES * PIECE_BYTES
        self._units = range(max(SLOTS, n_bytes // slot_bytes))
        self.n_bytes = len(self._units) * slot_bytes
        self._slots = [device.host.open_slot(slot_bytes) for _ in range(SLOTS)]
        for slot in self._slots:
            slot.host.random_()  # zeros may be stored as nothing
        self._spill = SpillFile(directory, self.n_bytes, PIECE_BYTES)
        self.direct = self._spill.direct

    def write(self) -> float:
        """Seconds of a pass."""
        return self._pass(lambda _: Recipe(0), lambda unit: self._recipe(unit, store=True))

    def read(self, piece_bytes: int = PIECE_BYTES) -> float:
        """Likewise."""
        return self._pass(lambda unit: self._recipe(unit, store=False, piece_bytes=piece_bytes), lambda _: None)

    def delay_s(self, work: Run, turns: int) -> float:
        """By how much ``work`` takes longer for each byte that is read beside it: turns alone and beside in between."""
        alone_s = beside_s = read_s = 0.0
        passes = 0
        for _ in range(turns):
            alone_s += _mean_seconds(work)
            with _Beside(self.read) as reader:
                beside_s += _mean_seconds(work)
            passes, read_s = passes + reader.count, read_s + reader.seconds
        return max(0.0, beside_s / alone_s - 1) * read_s / (passes * self.n_bytes)

    def latency_s(self) -> float:
        """Seconds of a read of one block somewhere in the file."""
        block = self._slots[0].host[:ALIGN]
        step = self.n_bytes // LOOKUPS // ALIGN * ALIGN
        begun = time.perf_counter()
        for number in range(LOOKUPS):
            self._spill.read(number * 7 % LOOKUPS * step, block)
        return (time.perf_counter() - begun) / LOOKUPS

    def close(self) -> None:
        self._spill.close()

    def _pass(self, load: Callable[[int], Recipe], store: Callable[[int], Recipe | None]) -> float:
        ring: Ring[int] = Ring(self._slots, load, Threads())
        try:
            begun = time.perf_counter()
            ring.expect(self._units)
            for unit in self._units:
                ring.acquire(unit)
                ring.release(unit, store(unit))
            ring.expect([])  # waits for what is being stored
            return time.perf_counter() - begun
        finally:
            ring.close()

    def _recipe(self, unit: int, store: bool, piece_bytes: int = PIECE_BYTES) -> Recipe:
        size = PIECES * PIECE_BYTES
        pieces = [
            BlockPiece(self._spill, unit * size + at, at, piece_bytes, store) for at in range(0, size, piece_bytes)
        ]
        return Recipe(size, pieces)


class _Beside:
    """Does something over and over in a thread, at least once, while a ``with`` block is left."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action, self._stop = action, threading.Event()
        self._thread = threading.Thread(target=self._run, name="helios-profile-reader", daemon=True)
        self.count = 0
        self.seconds = 0.0
        """That all took."""

    def __enter__(self) -> "_Beside":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        begun = time.perf_counter()
        while not self.count or not self._stop.is_set():
            self._action()
            self.count += 1
        self.seconds = time.perf_counter() - begun


def _mean_seconds(work: Run) -> float:
    """Of a run, over TURN_S and at least RUNS."""
    times = [work() for _ in range(RUNS)]
    ends = time.perf_counter() + TURN_S
    while time.perf_counter() < ends:
        times.append(work())
    return sum(times) / len(times)
