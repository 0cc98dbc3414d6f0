"""Boundary states: the hidden state after some layer of every position of a sequence, kept so that deeper layers can
run over the past when a model is expanded, without going through the shallow ones again.

They lie in blocks of 16 positions, on the device, on the host or on disk; elsewhere they are written behind the sweep
and read ahead of it, a tile at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .batch import Batch, Share, Tile
from .device import Slot
from .kv import BLOCK, BlockPool, blocks_for
from .sequence import Sequence as Generation
from .storage.ring import Ring
from .storage.spill import BlockPiece, Spill
from .storage.transfer import Recipe, Workers
from .tiers import Tier


class _Place(Protocol):
    """Where the rows of all blocks lie."""

    def write(self, tile: Tile, runs: "list[_Run]", hidden: Tensor) -> None: ...
    def read(self, batch: Batch, tile: Tile, runs: "list[list[_Run]]") -> Tensor: ...
    def release(self, tier: Tier) -> None: ...
    def close(self) -> None: ...


class _Run:
    """``count`` rows from ``row`` of a tile on are those from ``at`` on of the store."""

    __slots__ = ("at", "count", "row")

    def __init__(self, row: int, at: int, count: int) -> None:
        self.row, self.at, self.count = row, at, count


class BoundaryStates:
    """The states after one layer, for as many positions as there are blocks.

    A sink for the sweep that makes them, and a source for the one that goes on from them.
    """

    def __init__(self, place: _Place, n_blocks: int, n_bytes: int = 0) -> None:
        """``n_bytes`` are those in the device's ledger."""
        self._place, self.n_bytes = place, n_bytes
        self.pool = BlockPool(n_blocks)
        self._blocks: dict[str, list[int]] = {}
        self._filled: dict[str, int] = {}

    @classmethod
    def resident(cls, tier: Tier, hidden_size: int, dtype: torch.dtype, n_blocks: int) -> "BoundaryStates":
        """On the device. Raises OutOfMemoryError if they do not fit in ``tier``."""
        rows = tier.allocate((n_blocks * BLOCK, hidden_size), dtype, "boundary")
        return cls(_Resident(rows), n_blocks, rows.numel() * rows.itemsize)

    @classmethod
    def staged(
        cls,
        spill: Spill,
        slots: Sequence[Slot],
        workers: Workers,
        hidden_size: int,
        dtype: torch.dtype,
        n_blocks: int,
    ) -> "BoundaryStates":
        """Elsewhere. ``spill`` has room for ``n_blocks`` blocks, every slot for a tile."""
        return cls(_Staged(spill, slots, workers, hidden_size, dtype), n_blocks)

    def take(self, tile: Tile, hidden: Tensor) -> None:
        """Keep a tile's states [rows, H]. Raises OutOfMemoryError if there are no blocks left for them."""
        for share in _shares(tile):
            self._extend(share.sequence, share.start + share.count)
            if share.start <= self.filled(share.sequence):
                self._filled[share.sequence.request.request_id] = share.start + share.count
        self._place.write(tile, list(self._runs(tile)), hidden)

    def result(self, batch: Batch) -> Tensor:
        """Nothing: the states are kept."""
        return torch.empty(0)

    def __call__(self, batch: Batch, tile: Tile) -> Tensor:
        """A tile's kept states [rows, H]."""
        return self._place.read(batch, tile, [list(self._runs(other)) for other in batch.tiles])

    def length(self, sequence: Generation) -> int:
        """Positions there is room for at present; those a sweep has passed are kept."""
        return BLOCK * len(self._blocks.get(sequence.request.request_id, ()))

    def filled(self, sequence: Generation) -> int:
        """Positions from the first on whose states were kept."""
        return self._filled.get(sequence.request.request_id, 0)

    def release(self, tier: Tier) -> None:
        """Strike it out of the ledger. The caller drops its last reference."""
        self._place.release(tier)

    def forget(self, sequence: Generation) -> None:
        """Give a sequence's blocks back."""
        self._filled.pop(sequence.request.request_id, None)
        self.pool.give_back(self._blocks.pop(sequence.request.request_id, []))

    def close(self) -> None:
        self._place.close()

    def _extend(self, sequence: Generation, length: int) -> None:
        blocks = self._blocks.setdefault(sequence.request.request_id, [])
        missing = blocks_for(length) - len(blocks)
        if missing > 0:
            blocks += self.pool.take(missing)

    def _runs(self, tile: Tile) -> Iterator[_Run]:
        """The tile's rows as runs of neighbours in the store."""
        row = 0
        for share in _shares(tile):
            blocks = self._blocks[share.sequence.request.request_id]
            last: _Run | None = None
            position, end = share.start, share.start + share.count
            while position < end:
                count = min(BLOCK - position % BLOCK, end - position)
                at = blocks[position // BLOCK] * BLOCK + position % BLOCK
                if last is not None and last.at + last.count == at:
                    last.count += count
                else:
                    if last is not None:
                        yield last
                    last = _Run(row, at, count)
                row, position = row + count, position + count
            if last is not None:
                yield last


@dataclass(frozen=True, slots=True)
class Behind:
    """Layers that some sequences are to be taken through yet, from the states that were kept below them."""

    states: BoundaryStates
    layers: range

    def lags(self, sequence: Generation) -> bool:
        """Whether a sequence has positions that went through the layers below and not these."""
        return sequence.kv.of(self.layers) < sequence.kv.of(range(self.layers.start))


class _Resident:
    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def write(self, tile: Tile, runs: list[_Run], hidden: Tensor) -> None:
        for run in runs:
            self._rows[run.at : run.at + run.count] = hidden[run.row : run.row + run.count]

    def read(self, batch: Batch, tile: Tile, runs: list[list[_Run]]) -> Tensor:
        return torch.cat([self._rows[run.at : run.at + run.count] for run in runs[tile.number]])

    def release(self, tier: Tier) -> None:
        tier.free(self._rows)

    def close(self) -> None:
        return


class _Staged:
    def __init__(
        self, spill: Spill, slots: Sequence[Slot], workers: Workers, hidden_size: int, dtype: torch.dtype
    ) -> None:
        self._spill = spill
        self._width, self._dtype = hidden_size, dtype
        self._runs: list[list[_Run]] = []
        """To be read, of each tile."""
        self._ring: Ring[int] = Ring(slots, lambda number: self._recipe(self._runs[number], store=False), workers)

    def write(self, tile: Tile, runs: list[_Run], hidden: Tensor) -> None:
        self._runs = [[]]
        slot = self._ring.acquire(0)
        try:
            self._view(slot, len(hidden)).copy_(hidden)
        finally:
            self._ring.release(0, self._recipe(runs, store=True))

    def read(self, batch: Batch, tile: Tile, runs: list[list[_Run]]) -> Tensor:
        if tile.number == 0:
            self._runs = runs
            self._ring.expect(range(len(runs)))
        slot = self._ring.acquire(tile.number)
        try:
            return self._view(slot, tile.rows.stop - tile.rows.start).clone()
        finally:
            self._ring.release(tile.number)

    def release(self, tier: Tier) -> None:
        return

    def close(self) -> None:
        self._ring.close()
        self._spill.close()

    def _view(self, slot: Slot, rows: int) -> Tensor:
        return slot.content[: rows * self._width * self._dtype.itemsize].view(self._dtype).view(rows, self._width)

    def _recipe(self, runs: list[_Run], store: bool) -> Recipe:
        size = self._width * self._dtype.itemsize
        pieces = [BlockPiece(self._spill, run.at * size, run.row * size, run.count * size, store) for run in runs]
        return Recipe(max((run.row + run.count for run in runs), default=0) * size, pieces)


def _shares(tile: Tile) -> Iterator[Share]:
    """The tile's shares in row order."""
    for cohort in tile.cohorts:
        yield from cohort.shares
