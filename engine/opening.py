"""Opening what a budget names: the homes of KV and the room for hidden states. ``opened`` gets what must be closed."""

from contextlib import ExitStack

import torch

from .activations import Activations, Room
from .boundary import BoundaryStates
from .budget import SLOTS, Budget
from .config import EngineConfig, TierName
from .device import Device
from .kv import KVLayout
from .kv_homes import KVHome, ResidentKV, StagedKV
from .spec import ModelSpec
from .storage.spill import Spill
from .tiers import take_slots


def open_homes(
    config: EngineConfig, spec: ModelSpec, device: Device, budget: Budget, opened: ExitStack
) -> list[KVHome]:
    """The homes in the order in which sequences should fill them: device, host, disk.

    Raises OutOfMemoryError if a tier has no room, HeliosError if the offload directory cannot be used.
    """
    homes: list[KVHome] = []
    tiers = budget.tiers
    layout = KVLayout(budget.kv_format, budget.scratch_blocks, tiers["device"], device)

    def staged(tier: TierName, spill: Spill) -> StagedKV:
        slots = take_slots(device, tiers, SLOTS, budget.kv_slot_bytes)
        home = StagedKV(tier, layout, budget.kv_blocks[tier], spill, slots, device, read_ahead=config.read_ahead)
        opened.callback(home.close)
        return home

    if budget.kv_blocks["device"]:
        homes.append(ResidentKV(tiers["device"], layout, spec.n_layers, budget.kv_blocks["device"], device))
    if blocks := budget.kv_blocks["host"]:
        size = blocks * layout.block_bytes * spec.n_layers
        if config.delegate:
            near = layout
            if device.host is not device:
                near = KVLayout(budget.kv_format, budget.scratch_blocks, tiers["host"], device.host)
            homes.append(ResidentKV(tiers["host"], near, spec.n_layers, blocks, device.host))
        else:
            content = tiers["host"].allocate((size,), torch.uint8, "kv")
            homes.append(staged("host", device.storage.memory(content)))
    if blocks := budget.kv_blocks["disk"]:
        size = blocks * layout.block_bytes * spec.n_layers
        tiers["disk"].hold(size, "kv")
        homes.append(staged("disk", device.storage.spill(budget.offload_dir, size, layout.block_bytes)))
    return homes


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
    rooms = [Room(device_rows)] if device_rows else []
    if host_rows:
        content = tiers["host"].allocate((host_rows * row,), torch.uint8, "activations")
        rooms.append(Room(host_rows, device.storage.memory(content)))
    if disk_rows:
        tiers["disk"].hold(disk_rows * row, "activations")
        rooms.append(Room(disk_rows, device.storage.spill(budget.offload_dir, disk_rows * row, row)))
    slots = take_slots(device, tiers, SLOTS, budget.activation_slot_bytes) if budget.activation_slot_bytes else []
    workers = device.storage.workers(1) if slots else None
    activations = Activations(rooms, spec.hidden_size, device.dtype, slots, workers, read_ahead=config.read_ahead)
    opened.callback(activations.close)
    return activations
