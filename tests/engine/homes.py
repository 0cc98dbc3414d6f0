"""Homes of KV in plain memory, for tests that need blocks but no model."""

import torch

from engine.device import CpuDevice
from engine.kv import KVFormat, KVLayout
from engine.kv_homes import ResidentKV
from engine.spec import ModelSpec
from engine.tiers import Tier
from tests.engine.tiny import CONFIGS

SPEC = ModelSpec.from_config(CONFIGS["llama"].to_dict())


def cpu_tier(capacity_bytes: int = 10**8) -> Tier:
    return Tier("device", capacity_bytes, lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))


def resident(
    n_blocks: int,
    n_layers: int = 2,
    scratch_blocks: int = 8,
    dtype: torch.dtype = torch.float32,
    tier: Tier | None = None,
) -> ResidentKV:
    tier = tier or cpu_tier()
    device = CpuDevice(dtype, 1)
    layout = KVLayout(KVFormat(SPEC, dtype), scratch_blocks, tier, device)
    return ResidentKV(tier, layout, n_layers, n_blocks, device)
