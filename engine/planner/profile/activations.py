"""Operations that only move activations: norms, rotations, gates, additions."""

import torch
import torch.nn.functional as F

from ...block import normalise
from ...config import TILE_ROWS
from ...device import Device
from ...rope import rotate_
from ...weights import NormWeights
from ..processor import small_bytes
from .timing import Effort, timed, usual_seconds
from .toy import llama_spec

HIDDEN, HEADS = 1024, 16


def memory_rate(device: Device, effort: Effort) -> float:
    """Bytes a second, by the count of ``small_bytes``, of a layer's operations on a tile beside products and
    attention."""
    spec = llama_spec(HIDDEN, HEADS, HEADS)
    hidden, update, qkv, up = (
        device.from_host(torch.randn(TILE_ROWS, width).to(device.dtype))
        for width in (HIDDEN, HIDDEN, spec.q_size + 2 * spec.kv_size, 2 * spec.mlp_size)
    )
    norm = NormWeights(torch.ones_like(hidden[0]), None)
    angles = torch.ones_like(qkv[:, None, : spec.head_dim])
    rows = device.from_host(torch.arange(TILE_ROWS * 2 * spec.n_kv_heads))
    pool = qkv.new_empty(len(rows), spec.head_dim)

    def work() -> None:
        normalise(spec, norm, hidden)
        rotate_(qkv[:, : spec.q_size + spec.kv_size].view(TILE_ROWS, -1, spec.head_dim), angles, angles)
        pool.index_copy_(0, rows, qkv[:, spec.q_size :].reshape(-1, spec.head_dim))
        update.add_(hidden)
        normalise(spec, norm, update)
        F.silu(up[:, : spec.mlp_size]).mul_(up[:, spec.mlp_size :])
        update.add_(hidden)

    moved = small_bytes(spec, TILE_ROWS, device.dtype.itemsize)
    return moved / usual_seconds({"all": timed(device, work)}, effort)["all"]
