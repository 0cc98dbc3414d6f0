"""A batch: what one sweep's rows are, in the order they are computed, and the index tensors every layer uses."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from .attention import AttentionGroup, AttentionPlanner, Span
from .device import Device
from .kv import BLOCK, blocks_for
from .kv_homes import Extent, KVHome
from .rope import Rope
from .sequence import Sequence
from .spec import ModelSpec

FEW = 8
"""Rows of one sequence that are better attended to as so many decode steps than as a chunk."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one sequence does in a sweep: positions ``[start, start + count)``, no more than fit a tile."""

    sequence: Sequence
    start: int
    count: int
    logit_rows: int = 0
    """Of the last so many positions the logits are wanted: 0 in mid-prompt, 1 to sample, all to score."""


@dataclass(frozen=True, slots=True)
class Cohort:
    """Sequences with KV in one place that attend together: those of one or few rows, by length, then chunks."""

    rows: slice
    """Of the batch."""
    home: KVHome
    number: int
    """Among the sweep's cohorts in that home."""
    shares: tuple[Share, ...]
    """In row order."""
    kv_rows: Tensor
    """Where each row's K and V go in the pool: [rows * 2 * n_kv]."""
    attention: dict[int | None, list[AttentionGroup]]
    """Groups, in row order, by sliding window; None is full attention."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows that go through a layer together; their number bounds the workspace of a large prefill."""

    number: int
    rows: slice
    cohorts: tuple[Cohort, ...]
    angles: tuple[Tensor, Tensor] | None
    """cos and signed sin [rows, 1, head_dim]; None where positions are learned."""
    wanted: Tensor | None
    """Rows of the tile whose logits are wanted; None for all."""


@dataclass(frozen=True, slots=True)
class Batch:
    """R rows in tiles."""

    token_ids: Tensor  # [R]
    positions: Tensor  # [R]
    tiles: tuple[Tile, ...]
    logit_order: Tensor | None
    """Brings the wanted rows of the tiles, one after another, into the order of the sweep's shares; None: they are."""


class _Built(NamedTuple):
    key: object
    """All that the batch depends on."""
    batch: Batch
    extents: list[list[list[Extent]]]


class BatchBuilder:
    """Makes the batches of one engine, and tells the homes of its KV what is coming."""

    def __init__(
        self,
        spec: ModelSpec,
        homes: Seq[KVHome],
        rope: Rope | None,
        device: Device,
        *,
        tile_rows: int,
        value_share: float = 1.0,
    ) -> None:
        self.spec = spec
        self.homes = homes
        self._tile_rows, self._value_share = tile_rows, value_share
        self.rope = rope
        self.device = device
        self._planners = [AttentionPlanner(home.layout, home.device, value_share) for home in homes]
        self._last: _Built | None = None

    def build(self, shares: Seq[Share], layers: range) -> Batch:
        """The batch of a sweep over ``layers``. The sequences own the blocks that the positions need.

        Rows that go through one range of layers after another are put together once.
        """
        key = (set(self.spec.windows[layers.start : layers.stop]), [_identity(share) for share in shares])
        if self._last is not None and self._last.key == key:
            for home, cohorts in zip(self.homes, self._last.extents, strict=True):
                home.expect(cohorts, layers)
            return self._last.batch
        batch, extents = self._build(shares, layers)
        self._last = _Built(key, batch, extents)
        return batch

    def _build(self, shares: Seq[Share], layers: range) -> tuple[Batch, list[list[list[Extent]]]]:
        """The batch, and the extents of each home's cohorts."""
        order: list[int] = []
        expected: list[list[list[Extent]]] = []
        cohorts: list[Cohort] = []
        for home, planner in zip(self.homes, self._planners, strict=True):
            members = self._split(home, shares, [i for i, share in enumerate(shares) if share.sequence.home is home])
            extents = [[_extent(shares[i]) for i in chosen] for chosen in members]
            home.expect(extents, layers)
            expected.append(extents)
            for number, own in enumerate(extents):
                first = cohorts[-1].rows.stop if cohorts else 0
                chosen = tuple(shares[i] for i in members[number])
                cohorts.append(self._cohort(home, planner, number, first, chosen, own, layers))
                order += members[number]
        positions = np.concatenate([np.arange(shares[i].start, shares[i].start + shares[i].count) for i in order])
        tokens = [
            token
            for i in order
            for token in shares[i].sequence.tokens[shares[i].start : shares[i].start + shares[i].count]
        ]
        positions_tensor = self.device.index(positions)
        angles = self.rope.angles(positions_tensor, self.device.dtype) if self.rope else None
        wanted, logit_order = _wanted(shares, order)
        groups = self._groups(cohorts)
        if len(groups) == 1:  # the order costs nothing there
            wanted, logit_order = wanted[logit_order], np.arange(len(wanted))
        batch = Batch(
            token_ids=self.device.index(np.array(tokens, dtype=np.int64)),
            positions=positions_tensor,
            tiles=tuple(self._tile(number, group, angles, wanted) for number, group in enumerate(groups)),
            logit_order=None if _counts_up(logit_order, len(wanted)) else self.device.index(logit_order),
        )
        return batch, expected

    def _cohort(
        self,
        home: KVHome,
        planner: AttentionPlanner,
        number: int,
        first: int,
        shares: tuple[Share, ...],
        extents: list[Extent],
        layers: range,
    ) -> Cohort:
        tables = home.tables(extents)
        spans, row = [], 0
        for extent, table in zip(extents, tables, strict=True):
            spans.append(Span(row, extent.start, extent.count, table))
            row += extent.count
        positions = np.concatenate([np.arange(s.start, s.length) for s in spans])
        blocks = np.concatenate([np.take(s.blocks, np.arange(s.start, s.length) // BLOCK) for s in spans])
        decodes = [one for s in spans if self._alone(s.start, s.count) for one in s.single_rows()]
        chunks = [s for s in spans if not self._alone(s.start, s.count)]
        windows = set(self.spec.windows[layers.start : layers.stop])
        return Cohort(
            rows=slice(first, first + row),
            home=home,
            number=number,
            shares=shares,
            kv_rows=home.device.index(home.layout.write_rows(blocks, positions)),
            attention={window: planner.plan(decodes, chunks, window) for window in windows},
        )

    def _alone(self, start: int, count: int) -> bool:
        """Whether rows attend one by one, together with those of other sequences: decode steps, and the few rows that
        catch up with one or verify a draft. V in part is fetched for decode steps alone."""
        return count == 1 or (count <= FEW and start > 0 and self._value_share >= 1)

    def _groups(self, cohorts: list[Cohort]) -> list[list[Cohort]]:
        """Neighbouring cohorts that make a tile."""
        groups: list[list[Cohort]] = []
        for cohort in cohorts:
            if not groups or cohort.rows.stop - groups[-1][0].rows.start > self._tile_rows:
                groups.append([])
            groups[-1].append(cohort)
        return groups

    def _tile(self, number: int, group: list[Cohort], angles: tuple[Tensor, Tensor] | None, wanted: np.ndarray) -> Tile:
        rows = slice(group[0].rows.start, group[-1].rows.stop)
        own = wanted[(wanted >= rows.start) & (wanted < rows.stop)] - rows.start
        return Tile(
            number=number,
            rows=rows,
            cohorts=tuple(group),
            angles=None if angles is None else (angles[0][rows], angles[1][rows]),
            wanted=None if _counts_up(own, rows.stop - rows.start) else self.device.index(own),
        )

    def _split(self, home: KVHome, shares: Seq[Share], members: list[int]) -> list[list[int]]:
        """The shares of a home in cohorts that its slots and a tile allow, by length, chunks last."""
        cohorts: list[list[int]] = []
        rows = blocks = 0

        def order(i: int) -> tuple[bool, int, int]:
            start, count = shares[i].start, shares[i].count
            return not self._alone(start, count), start, count

        for i in sorted(members, key=order):
            count, needed = shares[i].count, blocks_for(shares[i].start + shares[i].count)
            full = home.cohort_blocks is not None and blocks + needed > home.cohort_blocks
            if not cohorts or full or rows + count > self._tile_rows:
                cohorts.append([])
                rows = blocks = 0
            cohorts[-1].append(i)
            rows, blocks = rows + count, blocks + needed
        return cohorts


def _identity(share: Share) -> tuple[object, ...]:
    """What of a share makes a batch what it is. It keeps the sequence alive, and so its identity its own."""
    sequence, end = share.sequence, share.start + share.count
    tokens, blocks = sequence.tokens[share.start : end], tuple(sequence.blocks)
    return sequence, sequence.home, share.start, share.count, share.logit_rows, tokens, blocks


def _extent(share: Share) -> Extent:
    return Extent(share.start, share.count, share.sequence.blocks)


def _wanted(shares: Seq[Share], order: Seq[int]) -> tuple[np.ndarray, np.ndarray]:
    """The rows whose logits are wanted, rising, and which of them come first in the order of the shares."""
    ends = dict(zip(order, np.cumsum([shares[i].count for i in order]).tolist(), strict=True))
    rows = np.concatenate([np.arange(ends[i] - share.logit_rows, ends[i]) for i, share in enumerate(shares)])
    rising = np.sort(rows)
    return rising, np.searchsorted(rising, rows)


def _counts_up(index: np.ndarray, count: int) -> bool:
    """Whether an index is 0, 1, … count - 1."""
    return len(index) == count and bool((index == np.arange(count)).all())
