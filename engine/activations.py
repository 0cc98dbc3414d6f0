"""Hidden states between the layers of a sweep: on the device as far as it has room, the rest on the host and on disk.

A tile's states stay in one place. Those elsewhere pass through slots: read ahead for the next tile, written back behind
the last one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .batch import Tile
from .device import Slot
from .storage.ring import Ring
from .storage.spill import BlockPiece, Spill
from .storage.transfer import Recipe, Workers

Step = Callable[[Tile, Tensor], Tensor]
Take = Callable[[Tile, Tensor], None]


@dataclass(frozen=True, slots=True)
class Room:
    """A place for the hidden states of so many rows; ``spill`` None is the device."""

    rows: int
    spill: Spill | None = None


class Activations:
    """The hidden states of one sweep at a time.

    A sweep is ``begin``, then ``step`` for its source and for each half of each layer, then ``end``.
    """

    def __init__(
        self,
        rooms: Sequence[Room],
        hidden_size: int,
        dtype: torch.dtype,
        slots: Sequence[Slot] = (),
        workers: Workers | None = None,
        *,
        read_ahead: bool = True,
    ) -> None:
        """Tiles fill ``rooms`` in order. ``slots`` hold a tile each; they and the one worker that moves tiles, so that
        each is stored before it is read again, are needed unless there is only the device.
        """
        self._rooms = rooms
        self._width, self._dtype = hidden_size, dtype
        self._held: dict[int, Tensor] = {}
        self._places: dict[int, tuple[Spill, int]] = {}
        """Of a tile that is elsewhere: where, and from which byte on."""
        self._tiles: Sequence[Tile] = ()
        self._stored = False
        self._ring: Ring[int] | None = Ring(slots, self._load, workers, ahead=read_ahead) if workers else None

    def begin(self, tiles: Sequence[Tile]) -> None:
        """A sweep of ``tiles`` begins; their states are set by the first ``step``."""
        self._tiles, self._stored = tiles, False
        self._held.clear()
        self._places.clear()
        room, used = 0, 0
        for number, tile in enumerate(tiles):
            count = tile.rows.stop - tile.rows.start
            while room + 1 < len(self._rooms) and used + count > self._rooms[room].rows:
                room, used = room + 1, 0
            spill = self._rooms[room].spill
            if spill is not None:
                self._places[number] = (spill, used * self._row_bytes)
            used += count

    def step(self, step: Step) -> None:
        """Replace the states [rows, H] of every tile by what ``step`` makes of them; of anything, the first time."""
        self._expect()
        for number, tile in enumerate(self._tiles):
            if number not in self._places:
                self._held[number] = step(tile, self._held.get(number, _NOTHING))
                continue
            with self._open(number, tile, store=True) as states:
                states.copy_(step(tile, states))
        self._stored = True

    def show(self, take: Take) -> None:
        """Hand out the states of every tile in order."""
        self._expect()
        for number, tile in enumerate(self._tiles):
            if number not in self._places:
                take(tile, self._held[number])
                continue
            with self._open(number, tile, store=False) as states:
                take(tile, states)

    def end(self, take: Take) -> None:
        """Likewise, and forget them."""
        self.show(take)
        self._held.clear()

    def _expect(self) -> None:
        if self._ring and self._places:
            self._ring.expect(list(self._places))

    @contextmanager
    def _open(self, number: int, tile: Tile, store: bool) -> Iterator[Tensor]:
        assert self._ring is not None, "rooms elsewhere come with slots"
        slot = self._ring.acquire(number)
        rows = tile.rows.stop - tile.rows.start
        try:
            yield slot.content[: rows * self._row_bytes].view(self._dtype).view(rows, self._width)
        finally:
            self._ring.release(number, self._recipe(number, store=True) if store else None)

    def close(self) -> None:
        if self._ring:
            self._ring.close()
        for room in self._rooms:
            if room.spill is not None:
                room.spill.close()

    @property
    def _row_bytes(self) -> int:
        return self._width * self._dtype.itemsize

    def _load(self, number: int) -> Recipe:
        return self._recipe(number, store=False) if self._stored else Recipe(0)

    def _recipe(self, number: int, store: bool) -> Recipe:
        spill, offset = self._places[number]
        tile = self._tiles[number]
        size = (tile.rows.stop - tile.rows.start) * self._row_bytes
        return Recipe(size, [BlockPiece(spill, offset, 0, size, store)])


_NOTHING = torch.empty(0)
