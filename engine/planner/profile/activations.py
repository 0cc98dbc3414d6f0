"""Operations that only move activations: norms, gates, additions."""

import torch
import torch.nn.functional as F

from ...block import normalise
from ...config import TILE_ROWS
from ...device import Device
from ...weights import NormWeights
from .timing import Effort, best_seconds, timed
from .toy import llama_spec

HIDDEN = 2048
MLP = 4 * HIDDEN


def memory_rate(device: Device, effort: Effort) -> float:
    """Bytes a second that a tile's norm, gated activation and residual addition read and write."""
    spec = llama_spec(HIDDEN, 16, 16)
    hidden, update, up = (
        device.from_host(torch.randn(TILE_ROWS, width).to(device.dtype)) for width in (HIDDEN, HIDDEN, 2 * MLP)
    )
    norm = NormWeights(torch.ones_like(hidden[0]), None)

    def work() -> None:
        normalise(spec, norm, hidden)  # reads and writes H
        F.silu(up[:, :MLP]).mul_(up[:, MLP:])  # reads and writes M, then reads 2 M and writes M
        update.add_(hidden)  # reads 2 H and writes H

    moved = TILE_ROWS * (5 * HIDDEN + 5 * MLP) * device.dtype.itemsize
    return moved / best_seconds({"all": timed(device, work)}, effort)["all"]
