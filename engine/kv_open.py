"""Opening the homes of KV that a budget names."""

import torch

from .budget import SLOTS, Budget
from .config import EngineConfig, TierName
from .device import Device
from .kv import KVLayout
from .kv_homes import KVHome, ResidentKV, StagedKV
from .spec import ModelSpec
from .storage.spill import SpillFile, SpillMemory
from .tiers import take_slots


def open_homes(config: EngineConfig, spec: ModelSpec, device: Device, budget: Budget) -> list[KVHome]:
    """The homes in the order in which sequences should fill them: device, host, disk.

    Raises OutOfMemoryError if a tier has no room, HeliosError if the offload directory cannot be used.
    """
    tiers, homes = budget.tiers, list[KVHome]()
    layout = KVLayout(budget.kv_format, budget.scratch_blocks, tiers["device"], device)

    def staged(tier: TierName, spill: SpillFile | SpillMemory) -> StagedKV:
        slots = take_slots(device, tiers, SLOTS, budget.kv_slot_bytes)
        return StagedKV(tier, layout, budget.kv_blocks[tier], spill, slots, device, read_ahead=config.read_ahead)

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
            homes.append(staged("host", SpillMemory(tiers["host"].allocate((size,), torch.uint8, "kv"))))
    if blocks := budget.kv_blocks["disk"]:
        size = blocks * layout.block_bytes * spec.n_layers
        tiers["disk"].hold(size, "kv")
        homes.append(staged("disk", SpillFile(budget.offload_dir, size, layout.block_bytes)))
    return homes
