"""The KV cache in blocks: per layer a pool of blocks of 64 positions, per sequence a table of the blocks it owns.

A pool is laid out head by head, ``[2, n_blocks, n_kv_heads, 64, head_dim]`` (K, then V), so that gathering the
blocks of a sequence gives contiguous ``[n_kv_heads, positions, head_dim]`` in one index operation.
"""

import numpy as np
import torch
from torch import Tensor

from .errors import OutOfMemoryError
from .spec import ModelSpec
from .tiers import Tier

BLOCK = 64
"""Positions in a block."""


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
    """Hands out block ids of one engine. A block id stands for the same block in every layer's pool."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._free = list(range(n_blocks - 1, -1, -1))

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many block ids. Raises OutOfMemoryError, and takes none, if there are not enough."""
        if count > len(self._free):
            raise OutOfMemoryError(
                f"{count} KV blocks were asked for and {len(self._free)} of {self.n_blocks} are free"
            )
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self._free.extend(reversed(blocks))


class KVCache:
    """The blocks of every layer on one tier, the row numbers that address them, and a scratch buffer to gather in."""

    def __init__(
        self, spec: ModelSpec, n_layers: int, n_blocks: int, scratch_blocks: int, dtype: torch.dtype, tier: Tier
    ) -> None:
        """``scratch_blocks`` is the most that one ``gather`` takes. Raises OutOfMemoryError if it does not fit."""
        self.spec = spec
        self.pool = BlockPool(n_blocks)
        self.scratch_blocks = scratch_blocks
        tier.require(n_blocks * block_bytes(spec, dtype, n_layers), "kv")
        tier.require(scratch_bytes(spec, dtype, scratch_blocks), "workspace")
        elements = scratch_blocks * BLOCK * spec.kv_elements_per_token
        self._scratch = tier.allocate((elements,), dtype, "workspace")
        shape = (2 * n_blocks * spec.n_kv_heads * BLOCK, spec.head_dim)
        # Zeroed, since attention multiplies what it masks by 0, and 0 * NaN is NaN; it also takes the page faults now.
        self.layers: list[Tensor] = [tier.allocate(shape, dtype, "kv").zero_() for _ in range(n_layers)]
        """Each [2 * n_blocks * n_kv_heads * 64, head_dim]: one row a (K or V, block, head, position)."""

    def write_rows(self, blocks: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rows that hold K and V of positions [R] which lie in blocks [R]: int64 [R * 2 * n_kv_heads], K before V."""
        heads = np.arange(self.spec.n_kv_heads)
        halves = np.arange(2)[None, :, None] * self.pool.n_blocks
        chunks = (halves + blocks[:, None, None]) * self.spec.n_kv_heads + heads  # [R, 2, n_kv]
        rows: np.ndarray = chunks * BLOCK + (positions % BLOCK)[:, None, None]
        return rows.reshape(-1)

    def gather_rows(self, tables: np.ndarray) -> np.ndarray:
        """Chunks (a block of one head) of block tables [B, n]: int64 [2 * B * n_kv_heads * n], for ``gather``."""
        heads = np.arange(self.spec.n_kv_heads)[:, None]
        halves = np.arange(2)[:, None, None, None] * self.pool.n_blocks
        chunks: np.ndarray = (halves + tables[:, None, :]) * self.spec.n_kv_heads + heads  # [2, B, n_kv, n]
        return chunks.reshape(-1)

    def write(self, layer: int, rows: Tensor, heads: Tensor) -> None:
        """Store K and V heads [R * 2 * n_kv_heads, head_dim] at ``rows`` of ``write_rows``."""
        self.layers[layer].index_copy_(0, rows, heads)

    def gather(self, layer: int, chunks: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """K and V [sequences, n_kv_heads, positions, head_dim] from the chunks of ``gather_rows``, contiguous.

        Whole blocks, so the last positions may hold anything finite. Views of the scratch buffer: valid until the
        next call.
        """
        width = BLOCK * self.spec.head_dim
        out = self._scratch[: chunks.numel() * width].view(-1, width)
        torch.index_select(self.layers[layer].view(-1, width), 0, chunks, out=out)
        both = out.view(2, sequences, self.spec.n_kv_heads, -1, self.spec.head_dim)
        return both[0], both[1]
