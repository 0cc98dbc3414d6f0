"""Rotary position embedding (Su et al., 2021) with linear, Llama 3 and YaRN (Peng et al., 2023) scaling."""

import math

import torch
from torch import Tensor

from .spec import RopeSpec


class Rope:
    """Angles of one model. ``inverse_frequencies`` [head_dim / 2], float32; cos and sin are scaled by ``scale``."""

    def __init__(self, spec: RopeSpec, head_dim: int, max_positions: int, device: torch.device) -> None:
        base = spec.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self.scale = 1.0
        frequencies = 1.0 / base
        if spec.type == "linear":
            frequencies = frequencies / spec.param("factor")
        elif spec.type == "llama3":
            frequencies = _llama3(frequencies, spec)
        elif spec.type == "yarn":
            frequencies, self.scale = _yarn(frequencies, spec, head_dim, max_positions)
        self.inverse_frequencies = frequencies.to(device)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and signed sin for positions [R], each [R, 1, head_dim]; sin's first half is negated for ``rotate_``."""
        angle = positions.to(torch.float32)[:, None] * self.inverse_frequencies  # [R, head_dim / 2]
        cos, sin = angle.cos() * self.scale, angle.sin() * self.scale
        return torch.cat((cos, cos), -1).unsqueeze(1).to(dtype), torch.cat((-sin, sin), -1).unsqueeze(1).to(dtype)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads [R, n, head_dim] in place: each pair (i, i + head_dim / 2) by its position's angle."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cos).addcmul_(swapped, sin)


def _llama3(frequencies: Tensor, spec: RopeSpec) -> Tensor:
    """Long wavelengths are divided by ``factor``, short ones kept, those between interpolated (Llama 3.1)."""
    factor, low, high = spec.param("factor"), spec.param("low_freq_factor"), spec.param("high_freq_factor")
    original = spec.param("original_max_position_embeddings")
    turns = original * frequencies / (2 * math.pi)  # rotations over the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / factor


def _yarn(frequencies: Tensor, spec: RopeSpec, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """YaRN: interpolate dimensions that turn less than ``beta_slow`` times, keep those above ``beta_fast``."""
    original = spec.param("original_max_position_embeddings")
    factor = spec.param("factor", max_positions / original)

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.param("beta_fast", 32.0)), dimension(spec.param("beta_slow", 1.0))
    if spec.param("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / factor, _yarn_scale(spec, factor)


def _yarn_scale(spec: RopeSpec, factor: float) -> float:
    def magnitude(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    given = spec.param("attention_factor", 0.0)
    if given:
        return given
    mscale, mscale_all = spec.param("mscale", 0.0), spec.param("mscale_all_dim", 0.0)
    if mscale and mscale_all:
        return magnitude(mscale) / magnitude(mscale_all)
    return magnitude(1.0)
