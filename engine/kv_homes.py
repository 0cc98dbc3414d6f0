"""Where the KV of a cohort lives: with the device that attends to it, or elsewhere and brought in layer by layer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .config import TierName
from .device import Device, Slot
from .errors import CohortError, HeliosError
from .kv import BLOCK, BlockPool, KVLayout, blocks_for
from .storage.direct import PIECE_BYTES, Bounce
from .storage.ring import Ring
from .storage.spill import BlockPiece, Spill
from .storage.transfer import Recipe, WrappedPiece
from .tiers import Tier


@dataclass(frozen=True, slots=True)
class Extent:
    """Positions ``[start, start + count)`` of a sequence are about to be computed; it has the blocks ``blocks``."""

    start: int
    count: int
    blocks: list[int]

    @property
    def length(self) -> int:
        """Positions with KV once the sweep has passed."""
        return self.start + self.count


class KVHome(Protocol):
    """KV of some sequences, all layers. Attention to it is computed by ``device`` on pools of ``layout``."""

    tier: TierName
    device: Device
    layout: KVLayout
    pool: BlockPool
    cohort_blocks: int | None
    """Blocks of one cohort at most; None for any number."""
    reserves: bool
    """A sequence gets the blocks of its longest possible life at once, so that they are neighbours."""

    def tables(self, extents: Sequence[Extent]) -> list[list[int]]:
        """For each sequence of a cohort, its blocks in the pool that ``open`` gives."""
        ...

    def expect(self, cohorts: Sequence[Sequence[Extent]], layers: range) -> None:
        """A sweep through ``layers`` begins, with these cohorts here."""
        ...

    @contextmanager
    def open(self, layer: int, cohort: int) -> Iterator[Tensor]:
        """The pool with the blocks of the cohort of that number. What is written to it is kept."""
        ...

    def close(self) -> None: ...


class ResidentKV:
    """A pool for each layer in the memory of the device that attends to it."""

    def __init__(self, tier: Tier, layout: KVLayout, n_layers: int, n_blocks: int, device: Device) -> None:
        """Raises OutOfMemoryError, taking nothing, if the pools do not fit in ``tier``."""
        tier.require(n_layers * n_blocks * layout.block_bytes, "kv")
        self.tier: TierName = tier.name
        self.cohort_blocks: int | None = None
        self.reserves = False
        self.device = device
        self.layout = layout
        self.pool = BlockPool(n_blocks)
        shape = layout.pool_shape(n_blocks)
        # Zeroed, since attention multiplies what it masks by 0, and 0 * NaN is NaN; it also takes the page faults now.
        self._pools = [tier.allocate(shape, layout.form.dtype, "kv").zero_() for _ in range(n_layers)]

    def tables(self, extents: Sequence[Extent]) -> list[list[int]]:
        return [extent.blocks for extent in extents]

    def expect(self, cohorts: Sequence[Sequence[Extent]], layers: range) -> None:
        return

    @contextmanager
    def open(self, layer: int, cohort: int) -> Iterator[Tensor]:
        yield self._pools[layer]

    def close(self) -> None:
        return


class StagedKV:
    """Blocks in a spill; those of one cohort and layer are brought to a slot, attended to, and written back.

    Only the blocks that a sweep adds to are written. Whole blocks move, so an exact copy of the pool is in the slot.
    """

    def __init__(
        self,
        tier: TierName,
        layout: KVLayout,
        n_blocks: int,
        spill: Spill,
        slots: Sequence[Slot],
        device: Device,
        *,
        read_ahead: bool = True,
    ) -> None:
        """``slots`` are of equal size and decide how large a cohort may be."""
        self.tier = tier
        self.reserves = True
        self.device = device
        self.layout = layout
        self.pool = BlockPool(n_blocks)
        self.cohort_blocks: int | None = slots[0].host.numel() // layout.block_bytes
        self._spill = spill
        self._cohorts: list[_Moves] = []
        self._ring: Ring[tuple[int, int]] = Ring(slots, self._load, device.storage.workers(), ahead=read_ahead)

    def tables(self, extents: Sequence[Extent]) -> list[list[int]]:
        tables, first = [], 0
        for extent in extents:
            count = blocks_for(extent.length)
            tables.append(list(range(first, first + count)))
            first += count
        return tables

    def expect(self, cohorts: Sequence[Sequence[Extent]], layers: range) -> None:
        self._ring.expect([])  # what the last sweep stored must be there before it is read
        self._cohorts = [_Moves.of(extents) for extents in cohorts]
        self._ring.expect([(layer, number) for layer in layers for number in range(len(cohorts))])

    @contextmanager
    def open(self, layer: int, cohort: int) -> Iterator[Tensor]:
        moves, stores = self._cohorts[cohort], None
        slot = self._ring.acquire((layer, cohort))
        layout = self.layout
        content = slot.content[: moves.n_blocks * layout.block_bytes].view(layout.form.dtype)
        try:
            yield content.view(layout.pool_shape(moves.n_blocks))
            stores = self._recipe(layer, moves, moves.stores, store=True)
        finally:
            self._ring.release((layer, cohort), stores)

    def close(self) -> None:
        self._ring.close()
        self._spill.close()

    def _load(self, key: tuple[int, int]) -> Recipe:
        layer, cohort = key
        moves = self._cohorts[cohort]
        return self._recipe(layer, moves, moves.loads, store=False)

    def _recipe(self, layer: int, moves: "_Moves", runs: Sequence["_Run"], store: bool) -> Recipe:
        size = self.layout.block_bytes
        step = max(1, PIECE_BYTES // size)
        pieces = []
        for run in runs:
            for done in range(0, run.count, step):
                count = min(step, run.count - done)
                offset = (layer * self.pool.n_blocks + run.block + done) * size
                piece = BlockPiece(self._spill, offset, (run.local + done) * size, count * size, store)
                pieces.append(_Blamed(piece, moves.blocks))
        return Recipe(moves.n_blocks * size, pieces)


@dataclass(slots=True)
class _Blamed(WrappedPiece):
    """A piece whose failure harms the sequences with these blocks, and no others."""

    blocks: list[list[int]]

    def run(self, host: Tensor, bounce: Bounce) -> None:
        try:
            self.piece.run(host, bounce)
        except HeliosError as error:
            raise CohortError(error, self.blocks) from None


@dataclass(frozen=True, slots=True)
class _Run:
    """``count`` neighbouring blocks from ``block`` on, which are ``local`` on in the slot."""

    block: int
    local: int
    count: int


@dataclass(frozen=True, slots=True)
class _Moves:
    """What a cohort brings in and writes back, the same for every layer."""

    n_blocks: int
    loads: list[_Run]
    stores: list[_Run]
    blocks: list[list[int]]
    """Of each sequence."""

    @classmethod
    def of(cls, extents: Sequence[Extent]) -> "_Moves":
        loads: list[_Run] = []
        stores: list[_Run] = []
        first = 0
        for extent in extents:
            count = blocks_for(extent.length)
            loads += _runs(extent.blocks, 0, blocks_for(extent.start), first)
            stores += _runs(extent.blocks, extent.start // BLOCK, count, first)
            first += count
        return cls(first, loads, stores, [extent.blocks for extent in extents])


def _runs(blocks: list[int], start: int, stop: int, first: int) -> list[_Run]:
    """Blocks number ``start`` to ``stop`` of a sequence whose block 0 is number ``first`` in the slot."""
    runs: list[_Run] = []
    for i in range(start, stop):
        last = runs[-1] if runs else None
        if last and blocks[i] == last.block + last.count:
            runs[-1] = _Run(last.block, last.local, last.count + 1)
        else:
            runs.append(_Run(blocks[i], first + i, 1))
    return runs
