"""Attention of a cohort: decode rows of many sequences in one call, prefill chunks a sequence at a time.

On either device the KV blocks a group needs are gathered into a scratch buffer and given to torch's fused attention.
Query heads that share a KV head are laid out as rows of it, so that K and V are read once and never repeated.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .device import Device
from .kv import BLOCK, KVLayout, blocks_for

WASTE = 0.25
"""Share of padded blocks a decode group may add to the blocks its sequences own."""
SLACK_BLOCKS = 16
"""Padded blocks that it may add beside that."""


@dataclass(frozen=True, slots=True)
class Span:
    """Rows ``[row, row + count)`` of a cohort: positions ``[start, start + count)`` of the sequence with ``blocks``."""

    row: int
    start: int
    count: int
    blocks: list[int]
    """Numbers of its blocks in the pool that attention is given."""

    @property
    def length(self) -> int:
        """Positions with KV once the sweep has passed."""
        return self.start + self.count

    def single_rows(self) -> "list[Span]":
        """Each of its rows by itself."""
        return [Span(self.row + i, self.start + i, 1, self.blocks) for i in range(self.count)]


class AttentionGroup(Protocol):
    """Some rows of a cohort that attend together."""

    @property
    def rows(self) -> slice: ...

    def attend(self, qkv: Tensor, layout: KVLayout, pool: Tensor) -> Tensor:
        """Attention output [rows, q_size] from the cohort's rotated qkv, whose K and V are in ``pool`` already."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """One row each of several sequences, padded to the longest of them."""

    device: Device
    rows: slice
    chunks: Tensor
    """Chunks of ``KVLayout.gather_rows`` [2, B * n_kv * n_blocks]."""
    mask: Tensor | None
    """Additive [B, 1, 1, 16 * n_blocks]; None when every gathered position is seen."""

    def attend(self, qkv: Tensor, layout: KVLayout, pool: Tensor) -> Tensor:
        spec = layout.spec
        b = self.rows.stop - self.rows.start
        query = qkv[self.rows, : spec.q_size].view(b, spec.n_kv_heads, -1, spec.head_dim)  # [B, n_kv, group, d]
        keys, values = layout.gather(pool, self.chunks, b)
        return self.device.decode_attention(query, keys, values, self.mask).reshape(b, spec.q_size)


@dataclass(frozen=True, slots=True)
class SparseDecodeGroup:
    """Likewise, but of V only the positions with the K largest attention weights are fetched (FlexGen, section 5).

    K is a share of the positions a sequence has, rounded up; its newest position is always one of them. The weights
    chosen are scaled to add up to 1 again: without that, as the authors have it, SmolLM2's perplexity on windows of
    256 tokens is 241 instead of 84 at a tenth of V, 36 being exact.
    """

    rows: slice
    chunks: Tensor
    """Chunks of K [1, B * n_kv * n_blocks]."""
    mask: Tensor | None
    newest: Tensor
    """[B, 1, 1, 1], the newest position."""
    counts: Tensor
    """[B, 1, 1, 1], K of each sequence."""
    most: int
    """The largest K."""
    value_rows: Tensor
    """Rows of the pool that hold V: [B, n_kv, 1, 16 * n_blocks]."""

    def attend(self, qkv: Tensor, layout: KVLayout, pool: Tensor) -> Tensor:
        spec = layout.spec
        b = self.rows.stop - self.rows.start
        query = qkv[self.rows, : spec.q_size].view(b, spec.n_kv_heads, -1, spec.head_dim)  # [B, n_kv, group, d]
        (keys,) = layout.gather(pool, self.chunks, b)  # [B, n_kv, T, d]
        scores = (query @ keys.transpose(2, 3)).float() * spec.head_dim**-0.5  # [B, n_kv, group, T]
        weights = (scores if self.mask is None else scores + self.mask).softmax(-1)
        index = self.newest.expand(*weights.shape[:3], 1)
        ranked = weights.scatter(3, index, torch.inf).topk(self.most, -1).indices  # [B, n_kv, group, K]
        chosen = weights.gather(3, ranked)
        chosen = chosen.masked_fill(torch.arange(self.most, device=chosen.device) >= self.counts, 0)
        chosen = chosen / chosen.sum(-1, keepdim=True)
        rows = self.value_rows.expand(*weights.shape).gather(3, ranked)
        values = layout.pick(pool, rows.reshape(-1)).view(*rows.shape, spec.head_dim)  # [B, n_kv, group, K, d]
        attended: Tensor = chosen.to(values.dtype).unsqueeze(3) @ values  # [B, n_kv, group, 1, d]
        return attended.reshape(b, spec.q_size)


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """Several rows of one sequence: a prefill chunk, or a draft to verify."""

    device: Device
    rows: slice
    start: int
    """Which of the keys is the first position's own."""
    chunks: Tensor | None
    """As in DecodeGroup; None when nothing precedes the chunk, whose K and V are then at hand in qkv."""
    mask: Tensor | None
    """Additive [count, 16 * n_blocks]; None: causal from the first position."""

    def attend(self, qkv: Tensor, layout: KVLayout, pool: Tensor) -> Tensor:
        spec = layout.spec
        count, n_kv, d = self.rows.stop - self.rows.start, spec.n_kv_heads, spec.head_dim
        query = qkv[self.rows, : spec.q_size].view(count, n_kv, -1, d).permute(1, 2, 0, 3)  # [n_kv, group, S, d]
        if self.chunks is None:
            own = qkv[self.rows, spec.q_size :].view(count, 2, n_kv, d).permute(1, 2, 0, 3)  # [2, n_kv, S, d]
            keys, values = own[0], own[1]
        else:
            keys, values = layout.gather(pool, self.chunks, 1)[:, 0]
        out = self.device.chunk_attention(query, keys, values, self.mask, self.start)
        return out.permute(2, 0, 1, 3).reshape(count, spec.q_size)


class AttentionPlanner:
    """Forms the attention groups of a cohort, none of them larger than the layout's scratch buffer."""

    def __init__(self, layout: KVLayout, device: Device, value_share: float = 1.0) -> None:
        """``value_share`` of a sequence's positions have their V fetched in decode."""
        self.layout = layout
        self.device = device
        self.value_share = value_share

    def plan(self, decodes: list[Span], chunks: list[Span], window: int | None) -> list[AttentionGroup]:
        """Groups for one row of each of ``decodes`` (about by length) and for each of ``chunks``."""
        groups: list[AttentionGroup] = [self._decode(members, window) for members in self._split(decodes, window)]
        groups.extend(self._chunk(span, window) for span in chunks)
        return groups

    def _split(self, spans: list[Span], window: int | None) -> list[list[Span]]:
        """Neighbours in length go together while padding wastes little and the scratch buffer holds them."""
        groups: list[list[Span]] = []
        own = longest = 0
        for span in spans:
            blocks = blocks_for(span.length) - _first_block(span.start, window)
            padded = (len(groups[-1]) + 1) * max(longest, blocks) if groups else 0
            most = min(self.layout.scratch_blocks, (1 + WASTE) * (own + blocks) + SLACK_BLOCKS)
            if not groups or padded > most:
                groups.append([])
                own = longest = 0
            groups[-1].append(span)
            own, longest = own + blocks, max(longest, blocks)
        return groups

    def _decode(self, spans: list[Span], window: int | None) -> AttentionGroup:
        firsts = np.array([_first_block(span.start, window) for span in spans])
        lengths = np.array([span.length for span in spans]) - firsts * BLOCK
        tables = np.zeros((len(spans), blocks_for(int(lengths.max()))), dtype=np.int64)
        for row, (span, first) in enumerate(zip(spans, firsts.tolist(), strict=True)):
            owned = span.blocks[first : blocks_for(span.length)]
            tables[row, : len(owned)] = owned
        positions = np.arange(tables.shape[1] * BLOCK)
        hidden = positions >= lengths[:, None]
        if window is not None:
            hidden |= positions < lengths[:, None] - window
        mask = self._additive(hidden)[:, None, None] if hidden.any() else None
        rows, chunks = slice(spans[0].row, spans[-1].row + 1), self.layout.gather_rows(tables)
        if self.value_share >= 1:
            return DecodeGroup(self.device, rows, self.device.index(chunks), mask)
        counts = np.ceil(self.value_share * (~hidden).sum(1)).astype(np.int64)
        heads = np.arange(self.layout.spec.n_kv_heads)[None, :, None]
        blocks = np.repeat(tables, BLOCK, axis=1)[:, None, :]  # [B, 1, T]
        n_kv = self.layout.spec.n_kv_heads
        value_rows = (blocks * (2 * n_kv) + n_kv + heads) * BLOCK + positions % BLOCK  # [B, n_kv, T]
        return SparseDecodeGroup(
            rows,
            self.device.index(chunks[:1]),
            mask,
            newest=self.device.index((lengths - 1)[:, None, None, None]),
            counts=self.device.index(counts[:, None, None, None]),
            most=int(counts.max()),
            value_rows=self.device.index(value_rows[:, :, None]),
        )

    def _chunk(self, span: Span, window: int | None) -> ChunkGroup:
        rows = slice(span.row, span.row + span.count)
        if span.start == 0 and (window is None or span.count <= window):
            return ChunkGroup(self.device, rows, 0, None, None)
        first = _first_block(span.start, window)
        tables = np.array([span.blocks[first : blocks_for(span.length)]], dtype=np.int64)
        query = np.arange(span.start, span.length)[:, None]
        keys = first * BLOCK + np.arange(tables.size * BLOCK)
        hidden = keys > query
        if window is not None:
            hidden |= keys <= query - window
        chunks = self.device.index(self.layout.gather_rows(tables))
        return ChunkGroup(self.device, rows, span.start - first * BLOCK, chunks, self._additive(hidden))

    def _additive(self, hidden: np.ndarray) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.device.dtype, device=self.device.torch_device)
        return mask.masked_fill_(self.device.index(hidden), float("-inf"))


def _first_block(start: int, window: int | None) -> int:
    """First block that a row at position ``start`` can see."""
    return 0 if window is None else max(0, start - window + 1) // BLOCK
