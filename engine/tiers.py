"""Tiers: the memories a model is spread over. Every large tensor comes from one, and its bytes are in a ledger."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from .config import TierName, format_bytes
from .device import Device, Slot
from .errors import OutOfMemoryError

Use = Literal["weights", "kv", "activations", "boundary", "workspace", "io", "libraries"]


class Tier:
    """A memory with a hard limit, e.g. "device", "host". Not thread-safe: one engine thread allocates.

    ``capacity_bytes`` counts everything the engine holds there, workspaces included.
    """

    def __init__(
        self,
        name: TierName,
        capacity_bytes: int,
        empty: Callable[[Sequence[int], torch.dtype], Tensor],
        remedy: str = "",
    ) -> None:
        """``empty`` makes an uninitialised tensor there; ``remedy`` is what a user can do when it is full."""
        self.remedy = remedy
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._empty = empty
        self._used: Counter[Use] = Counter()
        self._owners: dict[int, tuple[Tensor, Use, int]] = {}
        """By the tensor's identity."""

    @property
    def used_bytes(self) -> int:
        return sum(self._used.values())

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    def by_use(self) -> dict[str, int]:
        """Bytes held for each use."""
        return {use: count for use, count in [*self._used.items()] if count}

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, use: Use) -> Tensor:
        """An uninitialised contiguous tensor. Raises OutOfMemoryError, and takes nothing, if it does not fit."""
        size = math.prod(shape) * dtype.itemsize
        self.require(size, use)
        tensor = self._empty(shape, dtype)
        self._owners[id(tensor)] = (tensor, use, size)
        self._used[use] += size
        return tensor

    def hold(self, size: int, use: Use) -> None:
        """Enter bytes that a device keeps in a layout of its own. Raises OutOfMemoryError if they do not fit."""
        self.require(size, use)
        self._used[use] += size

    def let_go(self, size: int, use: Use) -> None:
        """Strike out bytes of ``hold``."""
        self._used[use] -= size

    def free(self, tensor: Tensor) -> None:
        """Give a tensor of ``allocate`` back. The caller drops its last reference to it."""
        _, use, size = self._owners.pop(id(tensor))
        self._used[use] -= size

    def require(self, size: int, use: Use) -> None:
        """Raise OutOfMemoryError unless ``size`` more bytes fit."""
        if size > self.free_bytes:
            raise OutOfMemoryError(
                f"tier '{self.name}' has {format_bytes(self.free_bytes)} left of {format_bytes(self.capacity_bytes)}; "
                f"{format_bytes(size)} more were asked for {use}. {self.remedy}"
            )


Tiers = Mapping[TierName, Tier]


def take_slots(device: Device, tiers: Tiers, count: int, n_bytes: int) -> list[Slot]:
    """Slots on the device, and on the host where they stand for device memory. Raises OutOfMemoryError."""
    tiers["device"].hold(count * n_bytes, "io")
    slots = [device.open_slot(n_bytes) for _ in range(count)]
    if any(slot.content is not slot.host for slot in slots):
        tiers["host"].hold(count * n_bytes, "io")
    return slots


def give_slots(tiers: Tiers, slots: list[Slot]) -> None:
    """Strike slots out of the ledgers. The caller drops its last references to them."""
    for slot in slots:
        tiers["device"].let_go(slot.host.numel(), "io")
        if slot.content is not slot.host:
            tiers["host"].let_go(slot.host.numel(), "io")
