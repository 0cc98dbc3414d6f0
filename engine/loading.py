"""Loading: what is to stay is read through slots, several at once, and copied to its place."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .device import Device, Slot
from .storage.ring import Ring
from .tiers import Tiers, give_slots, take_slots
from .units import UnitLayout

SLOTS = 3


class Load(NamedTuple):
    layout: UnitLayout
    keep: Callable[[Slot], object]
    """Copies what it needs out of the filled slot."""


def run_loads(
    loads: Sequence[Load], device: Device, tiers: Tiers, progress: Callable[[int], None] | None = None
) -> None:
    """Do the loads in order. ``progress`` is told of the bytes of each.

    Raises CheckpointError for what cannot be read, OutOfMemoryError when the device has no room for a single slot.
    """
    if not loads:
        return
    size = max(load.layout.n_bytes for load in loads)
    count = min(SLOTS, max(1, tiers["device"].free_bytes // size))
    slots = take_slots(device, tiers, count, size)
    ring: Ring[int] = Ring(slots, lambda i: loads[i].layout.recipe, device.storage.workers())
    try:
        ring.expect(range(len(loads)))
        for i, load in enumerate(loads):
            load.keep(ring.acquire(i))
            ring.release(i)
            if progress:
                progress(load.layout.n_bytes)
    finally:
        ring.close()
        give_slots(tiers, slots)
