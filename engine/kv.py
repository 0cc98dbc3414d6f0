"""KV in blocks of 16 positions: which blocks a sequence has, and how K and V lie in them.

A block of one layer is ``[2, n_kv_heads, 16, head_dim]`` (K, then V), so that it is one piece on disk, and gathering
the blocks of a sequence gives contiguous ``[n_kv_heads, positions, head_dim]`` in one index operation. In 4 bits the
last dimension is bytes: codes, then the groups' scales and minima.
"""

from bisect import insort
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .device import Device
from .errors import OutOfMemoryError
from .quant.expand import WORKSPACE_BYTES
from .quant.kv import KVCodec, kv_row_bytes
from .spec import ModelSpec
from .tiers import Tier

BLOCK = 16
"""Positions in a block. Larger ones would be padded more in attention, and be rewritten for every token on disk."""


def blocks_for(positions: int) -> int:
    """Blocks that hold so many positions."""
    return -(-positions // BLOCK)


class LayerLengths:
    """How many positions of a sequence have KV, per layer range: deep layers may lag behind shallow ones.

    Kept as ``[(end, length), …]`` with rising ends: layers below the first end have the first length, and so on.
    """

    __slots__ = ("_ranges", "n_layers")

    def __init__(self, n_layers: int) -> None:
        self.n_layers = n_layers
        self._ranges: list[tuple[int, int]] = [(n_layers, 0)]

    def of(self, layers: range) -> int:
        """Positions that every layer of the range has."""
        start, least = 0, None
        for end, length in self._ranges:
            if start < layers.stop and end > layers.start:
                least = length if least is None else min(least, length)
            start = end
        return least or 0

    def set(self, layers: range, length: int) -> None:
        """The layers of the range now have ``length`` positions."""
        per_layer: list[int] = []
        for end, old in self._ranges:
            per_layer.extend([old] * (end - len(per_layer)))
        per_layer[layers.start : layers.stop] = [length] * len(layers)
        ends = [i for i in range(1, self.n_layers) if per_layer[i] != per_layer[i - 1]] + [self.n_layers]
        self._ranges = [(end, per_layer[end - 1]) for end in ends]

    def cut(self, length: int) -> None:
        """Forget positions from ``length`` on, in every layer."""
        self._ranges = [(end, min(old, length)) for end, old in self._ranges]


class BlockPool:
    """Hands out block ids of one tier, neighbours where it can. An id stands for the same block in every layer."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._free = list(range(n_blocks))  # rising

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many block ids, neighbours if possible. Raises OutOfMemoryError, and takes none, if there are too few."""
        if count > len(self._free):
            raise OutOfMemoryError(f"{count} blocks were asked for and {len(self._free)} of {self.n_blocks} are free")
        start = self._run(count)
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            insort(self._free, block)

    def resize(self, n_blocks: int) -> dict[int, int]:
        """Have so many blocks, no fewer than are in use; returns the new ids of those that get another one."""
        free = set(self._free)
        used = [block for block in range(self.n_blocks) if block not in free]
        if len(used) > n_blocks:
            raise ValueError(f"{len(used)} blocks are in use; {n_blocks} are too few")
        left = sorted(set(range(n_blocks)).difference(used))
        moved = dict(zip((block for block in used if block >= n_blocks), left, strict=False))
        self._free, self.n_blocks = left[len(moved) :], n_blocks
        return moved

    def _run(self, count: int) -> int:
        """Where in the free list ``count`` neighbours begin; 0 if there is no such run."""
        start = 0
        for i in range(1, len(self._free)):
            if i - start >= count:
                return start
            if self._free[i] != self._free[i - 1] + 1:
                start = i
        return start if len(self._free) - start >= count else 0


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How K and V are stored: in the compute dtype, or in 4 bits with groups along the head."""

    spec: ModelSpec
    compute: torch.dtype
    int4: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of a stored row's elements."""
        return torch.uint8 if self.int4 else self.compute

    @property
    def row_width(self) -> int:
        """Elements of a stored row: K or V of one head at one position."""
        return kv_row_bytes(self.spec.head_dim) if self.int4 else self.spec.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return BLOCK * 2 * self.spec.n_kv_heads * self.row_width * self.dtype.itemsize

    def gathered_bytes(self, blocks: int) -> int:
        """Bytes of the buffers that so many blocks of one layer are gathered, and if in codes expanded, into."""
        expanded = blocks * BLOCK * self.spec.kv_elements_per_token * self.compute.itemsize
        return expanded + (blocks * self.block_bytes + WORKSPACE_BYTES if self.int4 else 0)


class KVLayout:
    """Row numbers in pools of blocks, and scratch buffers to gather into.

    A pool is a tensor ``[n_blocks * 2 * n_kv_heads * 16, row_width]``: one row a (block, K or V, head, position).
    """

    def __init__(self, form: KVFormat, scratch_blocks: int, tier: Tier, device: Device) -> None:
        """``scratch_blocks`` is the most that one ``gather`` takes. Raises OutOfMemoryError if it does not fit."""
        self.form = form
        self.spec = form.spec
        self.scratch_blocks = scratch_blocks
        elements = scratch_blocks * BLOCK * form.spec.kv_elements_per_token
        self._scratch = tier.allocate((elements,), form.compute, "workspace")
        self._codec: KVCodec | None = None
        if form.int4:
            tier.hold(WORKSPACE_BYTES, "workspace")
            self._codec = device.kv_codec(form.spec.head_dim)
            self._codes = tier.allocate((scratch_blocks * form.block_bytes,), torch.uint8, "workspace")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.form.block_bytes

    def pool_shape(self, n_blocks: int) -> tuple[int, int]:
        return n_blocks * 2 * self.spec.n_kv_heads * BLOCK, self.form.row_width

    def write_rows(self, blocks: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rows that hold K and V of positions [R] which lie in blocks [R]: int64 [R * 2 * n_kv_heads], K before V."""
        n = 2 * self.spec.n_kv_heads
        rows: np.ndarray = (blocks[:, None] * n + np.arange(n)) * BLOCK + (positions % BLOCK)[:, None]
        return rows.reshape(-1)

    def gather_rows(self, tables: np.ndarray) -> np.ndarray:
        """Chunks (a block of one head) of tables [B, n]: int64 [2, B * n_kv_heads * n], K and V, for ``gather``."""
        n_kv = self.spec.n_kv_heads
        heads = np.arange(n_kv)[:, None]
        halves = np.arange(2)[:, None, None, None] * n_kv
        chunks: np.ndarray = tables[:, None, :] * (2 * n_kv) + halves + heads  # [2, B, n_kv, n]
        return chunks.reshape(2, -1)

    def write(self, pool: Tensor, rows: Tensor, heads: Tensor) -> None:
        """Store K and V heads [R * 2 * n_kv_heads, head_dim] at ``rows`` of ``write_rows``."""
        pool.index_copy_(0, rows, self._codec.encode(heads) if self._codec else heads)

    def gather(self, pool: Tensor, chunks: Tensor, sequences: int) -> Tensor:
        """[halves, sequences, n_kv_heads, positions, head_dim], contiguous, from chunks [halves, n] of ``gather_rows``.

        Whole blocks, so the last positions may hold anything finite. A view of the scratch buffer: valid until the
        next call.
        """
        spec, width = self.spec, BLOCK * self.form.row_width
        out = self._scratch[: chunks.numel() * BLOCK * spec.head_dim]
        if self._codec is None:
            torch.index_select(pool.view(-1, width), 0, chunks.view(-1), out=out.view(-1, width))
        else:
            codes = self._codes[: chunks.numel() * width].view(-1, width)
            torch.index_select(pool.view(-1, width), 0, chunks.view(-1), out=codes)
            self._codec.decode(codes.view(-1, self.form.row_width), out.view(-1, spec.head_dim))
        return out.view(len(chunks), sequences, spec.n_kv_heads, -1, spec.head_dim)

    def pick(self, pool: Tensor, rows: Tensor) -> Tensor:
        """Single rows [N] of a pool as [N, head_dim]."""
        picked = pool.index_select(0, rows)
        if self._codec is None:
            return picked
        return self._codec.decode(picked, picked.new_empty((len(rows), self.spec.head_dim), dtype=self.form.compute))
