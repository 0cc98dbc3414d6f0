"""The KV cache in four bits: rows of K or V heads become rows of bytes, with groups along the head (FlexGen, sec. 5).

A row of ``head_dim`` elements takes ``head_dim / 2`` bytes of codes, byte j with element j in its low half and element
``head_dim / 2 + j`` in its high half, then the fp16 scales of its groups, then their fp16 minima. The numbers are those
of ``groups``; beyond 65504 in size a minimum or scale is cut to that, since one wild value must not become infinite.
"""

import torch
from torch import Tensor

from ..errors import ConfigError
from .expand import Workspace, split_halves
from .scheme import GROUP_SIZE

LEVELS = 15
LARGEST = 65504.0
"""The largest fp16."""
SMALLEST = torch.finfo(torch.float32).tiny
"""Stands for the width of a group of equal elements, whose codes are 0."""
ENCODED_ELEMENTS = 2**18
"""Elements encoded at once, so that what is in between stays in the cache: 3 MiB."""


def default_group(head_dim: int) -> int:
    """The largest divisor of the head's size up to 64."""
    return max(size for size in range(1, min(GROUP_SIZE, head_dim) + 1) if head_dim % size == 0)


def kv_row_bytes(head_dim: int, group_size: int | None = None) -> int:
    """Bytes of an encoded row."""
    return head_dim // 2 + 4 * (head_dim // (group_size or default_group(head_dim)))


class KVCodec:
    """Encodes and decodes head rows. Holds a workspace, so one thread uses it at a time."""

    def __init__(self, head_dim: int, group_size: int | None = None, device: torch.device | None = None) -> None:
        """Unless said, groups are of 64 elements, or of the largest divisor of ``head_dim`` below that.

        Raises ConfigError if groups do not fit.
        """
        self.head_dim = head_dim
        fit = default_group(head_dim)
        self.group_size = fit if group_size is None else group_size
        if head_dim % 4:
            raise ConfigError(f"head_dim is {head_dim}; the KV cache is quantised for multiples of 4 only")
        if self.group_size < 1 or head_dim % self.group_size:
            raise ConfigError(
                f"group_size is {self.group_size}; it must divide the head's {head_dim} elements, such as {fit}"
            )
        self._groups = head_dim // self.group_size
        self._workspace = Workspace(device)

    @property
    def row_bytes(self) -> int:
        """Bytes of an encoded row."""
        return kv_row_bytes(self.head_dim, self.group_size)

    def encode(self, heads: Tensor, out: Tensor | None = None) -> Tensor:
        """Encode heads [N, head_dim] of any floating-point type: uint8 [N, row_bytes], into ``out`` if given."""
        if out is None:
            out = torch.empty((len(heads), self.row_bytes), dtype=torch.uint8, device=heads.device)
        step = ENCODED_ELEMENTS // self.head_dim
        for start in range(0, len(heads), step):
            self._encode(heads[start : start + step], out[start : start + step])
        return out

    def _encode(self, heads: Tensor, out: Tensor) -> None:
        half = self.head_dim // 2
        groups = heads.float().view(-1, self._groups, self.group_size)
        low, high = groups.amin(2), groups.amax(2)  # aminmax takes 8 times as long as the two
        width = high.sub_(low)
        codes = (groups - low[..., None]).div_(width.clamp_min(SMALLEST)[..., None]).mul_(LEVELS).round_()
        codes = codes.view(-1, self.head_dim)
        out[:, :half].copy_(torch.add(codes[:, :half], codes[:, half:], alpha=16))
        scales = out[:, half:].view(torch.float16)
        scales[:, : self._groups].copy_(width.div_(LEVELS).clamp_(max=LARGEST))
        scales[:, self._groups :].copy_(low.clamp_(-LARGEST, LARGEST))

    def decode(self, rows: Tensor, out: Tensor) -> Tensor:
        """Decode rows [N, row_bytes] into ``out`` [N, head_dim], contiguous, bf16 or fp32. Returns ``out``."""
        step = self._workspace.floats.numel() // self.head_dim
        for start in range(0, len(rows), step):
            self._decode(rows[start : start + step], out[start : start + step])
        return out

    def _decode(self, rows: Tensor, out: Tensor) -> None:
        count, half = len(rows), self.head_dim // 2
        codes = self._workspace.bytes[: count * self.head_dim].view(count, self.head_dim)
        split_halves(rows[:, :half], codes[:, :half], codes[:, half:])
        scales = rows[:, half:].view(torch.float16).float()
        direct = out.dtype == torch.float32
        values = out if direct else self._workspace.floats[: codes.numel()].view(codes.shape)
        groups = values.copy_(codes).view(count, self._groups, self.group_size)
        groups.mul_(scales[:, : self._groups, None]).add_(scales[:, self._groups :, None])
        if not direct:
            out.copy_(values)
