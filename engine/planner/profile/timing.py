"""How runs are timed: they take turns, so that a slow moment of the machine falls on all; the median counts, since a
model that serves is not always lucky either."""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from ...device import Device

Key = TypeVar("Key", bound=Hashable)
Progress = Callable[[str, int, int], None]
"""Told of a step's name, of what is done of it, and of all there is to do; 0 in all is a notice."""
Run = Callable[[], float]
"""Does something once and returns the seconds of it that count."""
IN_A_ROW = 2
"""Runs of a turn at least, after one that may have to make the kernels for its shapes: oneDNN keeps only a few."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long measuring takes and what is measured."""

    seconds: float
    """Of each set of runs that take turns, about: it lasts longer where single runs are slow."""
    rounds: int
    """Turns of each run, and passes over the disk's file."""
    rows: tuple[int, ...]
    """Rows of a product."""
    kv_bytes: tuple[int, ...]
    """Bytes of K and V of one call of decode attention; the largest is what an engine gathers at most."""
    disk_bytes: int


FULL = Effort(
    seconds=4.0,
    rounds=3,
    rows=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    kv_bytes=(2**18, 2**19, 2**21, 2**23, 2**25),
    disk_bytes=2**30,
)
QUICK = Effort(seconds=0.3, rounds=2, rows=(1, 4, 16, 64, 256), kv_bytes=(2**19, 2**22, 2**25), disk_bytes=2**28)


def timed(device: Device, work: Callable[[], object]) -> Run:
    """A run of ``work``, until the device is done with it."""

    def run() -> float:
        device.synchronize()
        begun = time.perf_counter()
        with torch.inference_mode():
            work()
        device.synchronize()
        return time.perf_counter() - begun

    return run


def usual_seconds(runs: Mapping[Key, Run], effort: Effort) -> dict[Key, float]:
    """The median seconds of each run, over ``effort.rounds`` turns of a few runs in a row, the first of which do not
    count."""
    turn_s = effort.seconds / (effort.rounds * max(1, len(runs)))
    times: dict[Key, list[float]] = {key: [] for key in runs}
    for _ in range(effort.rounds):
        for key, run in runs.items():
            ends = time.perf_counter() + turn_s
            run()
            took = [run() for _ in range(IN_A_ROW)]
            while time.perf_counter() < ends:
                took.append(run())
            times[key] += took
    return {key: statistics.median(took) for key, took in times.items()}
