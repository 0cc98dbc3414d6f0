"""Files and workers of a simulated machine: nothing is read, but it takes its time."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import Tensor

from ...device import Slot
from ...storage.direct import SourceFile
from ...storage.spill import Spill
from ...storage.storage import Storage
from ...storage.transfer import WORKERS, Recipe, Transfer, Workers
from .clock import Clock, Link


@dataclass(frozen=True, slots=True)
class Links:
    """What bytes move over."""

    disk: Link
    copy: Link
    """Within host memory."""
    to_device: Link
    """From host memory to the device's; a copy where they are one."""
    to_host: Link


class SimulatedPlace:
    """A file, or host memory, on the other side of ``link``."""

    def __init__(self, link: Link, path: Path | None = None) -> None:
        self.link = link
        self.path = path

    def check(self) -> None:
        """It never changes."""

    def close(self) -> None:
        """Nothing is open."""


@dataclass(slots=True)
class _Transfer:
    slot: Slot
    clock: Clock
    end_s: float
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.clock.now_s >= self.end_s

    def wait(self) -> None:
        self.clock.wait_until(self.end_s)


class SimulatedWorkers:
    """Transfers begin when they are asked for and end when their links have carried them."""

    def __init__(self, clock: Clock, links: Links, handover_s: float) -> None:
        """``handover_s`` is what a piece takes the computing thread."""
        self._clock, self._links, self._handover_s = clock, links, handover_s

    def begin(self, slot: Slot, recipe: Recipe, store: bool) -> Transfer:
        self._clock.spend(len(recipe.pieces) * self._handover_s, "device", "handing over")
        at_s, crosses = self._clock.now_s, slot.content is not slot.host
        if store and crosses:
            at_s = self._links.to_host.carry(sum(piece.n_bytes for piece in recipe.pieces), at_s, "store")
        for piece in recipe.pieces:
            at_s = cast(SimulatedPlace, piece.place).link.carry(
                piece.n_bytes, at_s, "store" if store else "load", store
            )
        if not store and (crosses or recipe.source is not None):
            at_s = self._links.to_device.carry(recipe.n_bytes, at_s, "load")
        return _Transfer(slot, self._clock, at_s)

    def close(self) -> None:
        return


class SimulatedStorage(Storage):
    """Of a simulated machine."""

    def __init__(self, clock: Clock, links: Links, disk_bytes: int, latency_s: float) -> None:
        """``latency_s`` of the smallest read is also what handing a piece to a thread takes, for want of a better
        figure: both are a few switches between threads."""
        self._clock, self._links, self._disk_bytes, self._latency_s = clock, links, disk_bytes, latency_s

    def source(self, path: Path) -> SourceFile:
        return cast(SourceFile, SimulatedPlace(self._links.disk, path))

    def spill(self, directory: Path, n_bytes: int, unit_bytes: int) -> Spill:
        return cast(Spill, SimulatedPlace(self._links.disk))

    def memory(self, content: Tensor) -> Spill:
        return cast(Spill, SimulatedPlace(self._links.copy))

    def workers(self, count: int = WORKERS) -> Workers:
        return SimulatedWorkers(self._clock, self._links, self._latency_s)

    def free_bytes(self, directory: Path) -> int:
        return self._disk_bytes
