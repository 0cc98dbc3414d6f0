"""Where the KV of a cohort lives: with the device that attends to it, or elsewhere and brought in layer by layer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

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

    def more(self, count: int) -> list[Any]:
        """Memory for so many further layers, which is not in use yet. Raises OutOfMemoryError, and takes nothing."""
        ...

    def give_up(self, layers: list[Any]) -> None:
        """Strike memory of ``more`` out of the ledgers."""
        ...

    def exchange(self, first: int, layers: list[Any]) -> None:
        """Have these layers in the place of those from number ``first`` on, which are given up."""
        ...

    def close(self) -> None: ...


class ResidentKV:
    """A pool for each layer in the memory of the device that attends to it."""

    def __init__(self, tier: Tier, layout: KVLayout, n_layers: int, n_blocks: int, device: Device) -> None:
        """Raises OutOfMemoryError, taking nothing, if the pools do not fit in ``tier``."""
        self.tier: TierName = tier.name
        self._tier = tier
        self.cohort_blocks: int | None = None
        self.reserves = False
        self.device = device
        self.layout = layout
        self.pool = BlockPool(n_blocks)
        self._pools = self.more(n_layers)

    def more(self, count: int) -> list[Tensor]:
        self._tier.require(count * self._layer_bytes(self.pool.n_blocks), "kv")
        return [self._pool() for _ in range(count)]

    def give_up(self, layers: list[Tensor]) -> None:
        for pool in layers:
            self._tier.free(pool)

    def exchange(self, first: int, layers: list[Tensor]) -> None:
        self.give_up(self._pools[first:])
        self._pools[first:] = layers

    def resize(self, n_blocks: int) -> dict[int, int]:
        """Have so many blocks, no fewer than are in use; returns the new ids of those that get another one.

        A layer's blocks are copied while its pool is there twice. Raises OutOfMemoryError, and changes nothing, if
        there is no room for that; with no block in use none is needed.
        """
        before, count = self.pool.n_blocks, len(self._pools)
        if self.pool.free_blocks == before:
            self._tier.require(count * (self._layer_bytes(n_blocks) - self._layer_bytes(before)), "kv")
            self.exchange(0, [])
            self.pool.resize(n_blocks)
            self._pools = self.more(count)
            return {}
        growth = max(0, (count - 1) * (self._layer_bytes(n_blocks) - self._layer_bytes(before)))
        self._tier.require(growth + self._layer_bytes(n_blocks), "kv")
        moved = self.pool.resize(n_blocks)
        rows = self.layout.pool_shape(1)[0]
        kept = min(before, n_blocks) * rows
        for number, old in enumerate(self._pools):
            new = self._pool()
            new[:kept].copy_(old[:kept])
            for block, place in moved.items():
                new[place * rows : (place + 1) * rows].copy_(old[block * rows : (block + 1) * rows])
            self._tier.free(old)
            self._pools[number] = new
        return moved

    def largest(self) -> int:
        """Blocks up to which ``resize`` has room."""
        block, layers, before = self.layout.block_bytes, len(self._pools), self.pool.n_blocks
        if self.pool.free_blocks == before:
            return before + self._tier.free_bytes // (layers * block)
        return max(before, (self._tier.free_bytes // block + (layers - 1) * before) // layers)

    def _pool(self) -> Tensor:
        shape = self.layout.pool_shape(self.pool.n_blocks)
        # Zeroed, since attention multiplies what it masks by 0, and 0 * NaN is NaN; it also takes the page faults now.
        return self._tier.allocate(shape, self.layout.form.dtype, "kv").zero_()

    def _layer_bytes(self, n_blocks: int) -> int:
        return n_blocks * self.layout.block_bytes

    def tables(self, extents: Sequence[Extent]) -> list[list[int]]:
        return [extent.blocks for extent in extents]

    def expect(self, cohorts: Sequence[Sequence[Extent]], layers: range) -> None:
        return

    @contextmanager
    def open(self, layer: int, cohort: int) -> Iterator[Tensor]:
        yield self._pools[layer]

    def close(self) -> None:
        return


class Room(Protocol):
    """Makes spills of one size, and enters them in a ledger."""

    def take(self) -> Spill:
        """Raises OutOfMemoryError, HeliosError."""
        ...

    def give(self, spill: Spill) -> None:
        """Close one and strike it out."""
        ...


class StagedKV:
    """Blocks in a spill for each layer; those of one cohort are brought to a slot, attended to, and written back.

    Only the blocks that a sweep adds to are written. Whole blocks move, so an exact copy of the pool is in the slot.
    """

    def __init__(
        self,
        tier: TierName,
        layout: KVLayout,
        n_layers: int,
        n_blocks: int,
        room: Room,
        slots: Sequence[Slot],
        device: Device,
        *,
        read_ahead: bool = True,
    ) -> None:
        """``room`` makes spills for a layer's blocks; ``slots`` are of equal size and decide how large a cohort may be.

        Raises as ``room`` does.
        """
        self.tier = tier
        self.reserves = True
        self.device = device
        self.layout = layout
        self.pool = BlockPool(n_blocks)
        self.cohort_blocks: int | None = slots[0].host.numel() // layout.block_bytes
        self._room = room
        self._spills = self.more(n_layers)
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

    def more(self, count: int) -> list[Spill]:
        spills: list[Spill] = []
        try:
            spills.extend(self._room.take() for _ in range(count))
        except BaseException:
            self.give_up(spills)
            raise
        return spills

    def give_up(self, layers: list[Spill]) -> None:
        for spill in layers:
            self._room.give(spill)

    def exchange(self, first: int, layers: list[Spill]) -> None:
        self._ring.expect([])  # what the last sweep stored is on its way until then
        self.give_up(self._spills[first:])
        self._spills[first:] = layers

    def close(self) -> None:
        self._ring.close()
        for spill in self._spills:
            spill.close()

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
                offset = (run.block + done) * size
                piece = BlockPiece(self._spills[layer], offset, (run.local + done) * size, count * size, store)
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
