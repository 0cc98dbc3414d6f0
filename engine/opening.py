"""Opening what a budget names: weights, the homes of KV, the room for hidden states. ``opened`` gets what must be
closed."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from .activations import Activations
from .activations import Room as Rows
from .boundary import BoundaryStates
from .budget import SLOTS, Budget
from .config import EngineConfig, TierName
from .device import Device, Slot
from .held import Weights, load_weights
from .kv import KVLayout
from .kv_homes import KVHome, ResidentKV, Room, StagedKV
from .quant.ready import Expander
from .spec import ModelSpec
from .storage.spill import Spill
from .tiers import Tier, take_slots
from .units import Layouts
from .weight_store import WeightStore


def open_homes(
    config: EngineConfig, spec: ModelSpec, device: Device, budget: Budget, opened: ExitStack
) -> list[KVHome]:
    """The homes in the order in which sequences should fill them: device, host, disk.

    Raises OutOfMemoryError if a tier has no room, HeliosError if the offload directory cannot be used.
    """
    homes: list[KVHome] = []
    tiers = budget.tiers
    layout = KVLayout(budget.kv_format, budget.scratch_blocks, tiers["device"], device)

    def staged(tier: TierName, room: Room) -> StagedKV:
        slots = take_slots(device, tiers, SLOTS, budget.kv_slot_bytes)
        blocks, ahead = budget.kv_blocks[tier], config.read_ahead
        home = StagedKV(tier, layout, spec.n_layers, blocks, room, slots, device, read_ahead=ahead)
        opened.callback(home.close)
        return home

    if budget.kv_blocks["device"]:
        homes.append(ResidentKV(tiers["device"], layout, spec.n_layers, budget.kv_blocks["device"], device))
    if blocks := budget.kv_blocks["host"]:
        if config.delegate:
            near = layout
            if device.host is not device:
                near = KVLayout(budget.kv_format, budget.scratch_blocks, tiers["host"], device.host)
            homes.append(ResidentKV(tiers["host"], near, spec.n_layers, blocks, device.host))
        else:
            homes.append(staged("host", _HostRoom(tiers["host"], device, blocks * layout.block_bytes)))
    if blocks := budget.kv_blocks["disk"]:
        room = _DiskRoom(tiers["disk"], device, budget.offload_dir, blocks * layout.block_bytes, layout.block_bytes)
        homes.append(staged("disk", room))
    return homes


class _HostRoom:
    def __init__(self, tier: Tier, device: Device, n_bytes: int) -> None:
        self._tier, self._device, self._bytes = tier, device, n_bytes
        self._contents: dict[int, Tensor] = {}

    def take(self) -> Spill:
        content = self._tier.allocate((self._bytes,), torch.uint8, "kv")
        spill = self._device.storage.memory(content)
        self._contents[id(spill)] = content
        return spill

    def give(self, spill: Spill) -> None:
        spill.close()
        self._tier.free(self._contents.pop(id(spill)))


class _DiskRoom:
    def __init__(self, tier: Tier, device: Device, directory: Path, n_bytes: int, unit_bytes: int) -> None:
        self._tier, self._device = tier, device
        self._directory, self._bytes, self._unit = directory, n_bytes, unit_bytes

    def take(self) -> Spill:
        self._tier.require(self._bytes, "kv")
        spill = self._device.storage.spill(self._directory, self._bytes, self._unit)
        self._tier.hold(self._bytes, "kv")
        return spill

    def give(self, spill: Spill) -> None:
        spill.close()
        self._tier.let_go(self._bytes, "kv")


def open_weights(
    layouts: Layouts,
    spec: ModelSpec,
    device: Device,
    budget: Budget,
    opened: ExitStack,
    *,
    read_ahead: bool,
    progress: Callable[[int], None] | None = None,
) -> WeightStore:
    """Load the weights where the budget places them. Raises CheckpointError, OutOfMemoryError."""
    tiers, expander = budget.tiers, None
    if layouts.quantisation is not None:
        tiers["device"].hold(Expander.workspace_bytes(), "workspace")
        elements = budget.expansion_bytes // device.dtype.itemsize
        expander = Expander(tiers["device"].allocate((elements,), device.dtype, "workspace"), device)
    weights = load_weights(layouts, spec, device, tiers, budget.placement, progress=progress)
    slots = weight_slots(weights, device, budget)
    store = WeightStore(device, tiers, weights, layouts, slots, expander=expander, read_ahead=read_ahead)
    opened.callback(store.close)
    return store


def weight_slots(weights: Weights, device: Device, budget: Budget, have: Sequence[Slot] = ()) -> Sequence[Slot]:
    """Slots for what is not resident: those that there are, if they will do. Raises OutOfMemoryError."""
    size = max((part.streamed.n_bytes for part in weights.matrices.values() if part.streamed), default=0)
    if size == 0 or (len(have) >= budget.weight_slots and have[0].host.numel() >= size):
        return have if size else ()
    return take_slots(device, budget.tiers, budget.weight_slots, size)


def open_kept(spec: ModelSpec, device: Device, budget: Budget) -> dict[int, BoundaryStates]:
    """Stores for the states at exits of every position that the homes have KV for. Raises OutOfMemoryError."""
    tier, blocks = budget.tiers["device"], sum(budget.kv_blocks.values())
    return {layer: BoundaryStates.resident(tier, spec.hidden_size, device.dtype, blocks) for layer in budget.kept}


def open_activations(
    config: EngineConfig, spec: ModelSpec, device: Device, budget: Budget, opened: ExitStack
) -> Activations:
    """The room for hidden states on the tiers in order. Raises as ``open_homes``."""
    tiers, row = budget.tiers, spec.hidden_size * device.dtype.itemsize
    device_rows, host_rows, disk_rows = budget.activation_rows
    rooms = [Rows(device_rows)] if device_rows else []
    if host_rows:
        content = tiers["host"].allocate((host_rows * row,), torch.uint8, "activations")
        rooms.append(Rows(host_rows, device.storage.memory(content)))
    if disk_rows:
        tiers["disk"].hold(disk_rows * row, "activations")
        rooms.append(Rows(disk_rows, device.storage.spill(budget.offload_dir, disk_rows * row, row)))
    slots = take_slots(device, tiers, SLOTS, budget.activation_slot_bytes) if budget.activation_slot_bytes else []
    workers = device.storage.workers(1) if slots else None
    activations = Activations(rooms, spec.hidden_size, device.dtype, slots, workers, read_ahead=config.read_ahead)
    opened.callback(activations.close)
    return activations
