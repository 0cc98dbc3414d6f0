"""KV in blocks of 16 positions: which blocks a sequence has, and how K and V lie in them.

A block of one layer is ``[2, n_kv_heads, 16, head_dim]`` (K, then V), so that it is one piece on disk, and gathering
the blocks of a sequence gives contiguous ``[n_kv_heads, positions, head_dim]`` in one index operation.
"""

from bisect import insort

import numpy as np
import torch
from torch import Tensor

from .errors import OutOfMemoryError
from .spec import ModelSpec
from .tiers import Tier

BLOCK = 16
"""Positions in a block. Larger ones would be padded more in attention, and be rewritten for every token on disk."""


def block_bytes(spec: ModelSpec, dtype: torch.dtype, n_layers: int) -> int:
    """Bytes that one block takes over ``n_layers`` layers."""
    return BLOCK * spec.kv_elements_per_token * dtype.itemsize * n_layers


def scratch_bytes(spec: ModelSpec, dtype: torch.dtype, scratch_blocks: int) -> int:
    """Bytes of the buffer that so many blocks of one layer are gathered into."""
    return block_bytes(spec, dtype, 1) * scratch_blocks


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
            raise OutOfMemoryError(
                f"{count} KV blocks were asked for and {len(self._free)} of {self.n_blocks} are free"
            )
        start = self._run(count)
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            insort(self._free, block)

    def _run(self, count: int) -> int:
        """Where in the free list ``count`` neighbours begin; 0 if there is no such run."""
        start = 0
        for i in range(1, len(self._free)):
            if i - start >= count:
                return start
            if self._free[i] != self._free[i - 1] + 1:
                start = i
        return start if len(self._free) - start >= count else 0


class KVLayout:
    """Row numbers in pools of blocks, and a scratch buffer to gather into.

    A pool is a tensor ``[n_blocks * 2 * n_kv_heads * 16, head_dim]``: one row a (block, K or V, head, position).
    """

    def __init__(self, spec: ModelSpec, scratch_blocks: int, dtype: torch.dtype, tier: Tier) -> None:
        """``scratch_blocks`` is the most that one ``gather`` takes. Raises OutOfMemoryError if it does not fit."""
        self.spec = spec
        self.dtype = dtype
        self.scratch_blocks = scratch_blocks
        self._scratch = tier.allocate((scratch_blocks * BLOCK * spec.kv_elements_per_token,), dtype, "workspace")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return block_bytes(self.spec, self.dtype, 1)

    def pool_shape(self, n_blocks: int) -> tuple[int, int]:
        return n_blocks * 2 * self.spec.n_kv_heads * BLOCK, self.spec.head_dim

    def write_rows(self, blocks: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rows that hold K and V of positions [R] which lie in blocks [R]: int64 [R * 2 * n_kv_heads], K before V."""
        n = 2 * self.spec.n_kv_heads
        rows: np.ndarray = (blocks[:, None] * n + np.arange(n)) * BLOCK + (positions % BLOCK)[:, None]
        return rows.reshape(-1)

    def gather_rows(self, tables: np.ndarray) -> np.ndarray:
        """Chunks (a block of one head) of block tables [B, n]: int64 [2 * B * n_kv_heads * n], for ``gather``."""
        n_kv = self.spec.n_kv_heads
        heads = np.arange(n_kv)[:, None]
        halves = np.arange(2)[:, None, None, None] * n_kv
        chunks: np.ndarray = tables[:, None, :] * (2 * n_kv) + halves + heads  # [2, B, n_kv, n]
        return chunks.reshape(-1)

    def write(self, pool: Tensor, rows: Tensor, heads: Tensor) -> None:
        """Store K and V heads [R * 2 * n_kv_heads, head_dim] at ``rows`` of ``write_rows``."""
        pool.index_copy_(0, rows, heads)

    def gather(self, pool: Tensor, chunks: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """K and V [sequences, n_kv_heads, positions, head_dim] from the chunks of ``gather_rows``, contiguous.

        Whole blocks, so the last positions may hold anything finite. Views of the scratch buffer: valid until the
        next call.
        """
        width = BLOCK * self.spec.head_dim
        out = self._scratch[: chunks.numel() * width].view(-1, width)
        torch.index_select(pool.view(-1, width), 0, chunks, out=out)
        both = out.view(2, sequences, self.spec.n_kv_heads, -1, self.spec.head_dim)
        return both[0], both[1]
