"""Transfers between slots and what lies elsewhere, and the threads that do them while the engine computes."""

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from .direct import Bounce, SourceFile

if TYPE_CHECKING:  # devices are built upon storage
    from ..device.base import Slot

WORKERS = 3
"""Threads that read and write: enough for the disk's full speed with pieces of PIECE_BYTES."""


class Piece(Protocol):
    """A part of a transfer that one thread does."""

    @property
    def place(self) -> object:
        """The file or memory on the other side."""

    @property
    def at(self) -> int:
        """Its first byte in the slot."""

    @property
    def n_bytes(self) -> int:
        """Bytes moved; of a piece that is stored, those of the slot too."""

    def run(self, host: Tensor, bounce: Bounce) -> None:
        """Fill, or store, this piece's bytes of a slot's ``host``."""


@dataclass(slots=True)
class WrappedPiece:
    """A piece with something done before or after it: a subclass has its own ``run``."""

    piece: Piece

    @property
    def place(self) -> object:
        return self.piece.place

    @property
    def at(self) -> int:
        return self.piece.at

    @property
    def n_bytes(self) -> int:
        return self.piece.n_bytes

    def run(self, host: Tensor, bounce: Bounce) -> None:
        self.piece.run(host, bounce)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a slot is filled or stored: by pieces of its host memory, or filled by a copy of ``source``."""

    n_bytes: int
    pieces: Sequence[Piece] = ()
    source: Tensor | None = None
    files: Sequence[SourceFile] = ()
    """Files that must be found unchanged once the pieces are read."""


class Transfer(Protocol):
    """A slot on its way."""

    @property
    def slot(self) -> "Slot": ...

    @property
    def error(self) -> BaseException | None:
        """What went wrong, once it is done."""

    @property
    def done(self) -> bool: ...

    def wait(self) -> None:
        """Until it is done, whatever came of it."""


class Workers(Protocol):
    """Those who fill and store slots, in the order in which they are told to."""

    def begin(self, slot: "Slot", recipe: Recipe, store: bool) -> Transfer: ...

    def close(self) -> None:
        """Stop when everything begun is done."""


@dataclass(slots=True, eq=False)
class _Transfer:
    slot: "Slot"
    recipe: Recipe
    store: bool
    left: int
    error: BaseException | None = None
    event: threading.Event = field(default_factory=threading.Event)

    @property
    def done(self) -> bool:
        return self.event.is_set()

    def wait(self) -> None:
        self.event.wait()


class Threads:
    """Workers that are threads of this process, which share the pieces of every transfer."""

    def __init__(self, count: int = WORKERS) -> None:
        self._jobs: queue.SimpleQueue[tuple[_Transfer, Piece | None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._work, name=f"helios-io-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def begin(self, slot: "Slot", recipe: Recipe, store: bool) -> Transfer:
        transfer = _Transfer(slot, recipe, store, left=max(1, len(recipe.pieces)))
        for piece in recipe.pieces or (None,):
            self._jobs.put((transfer, piece))
        return transfer

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        bounce = Bounce()
        while (job := self._jobs.get()) is not None:
            transfer, piece = job
            try:
                if piece is not None and transfer.error is None:
                    if transfer.store:
                        transfer.slot.download(piece.at, piece.n_bytes)
                    else:
                        transfer.slot.begin()
                    piece.run(transfer.slot.host, bounce)
            except BaseException as error:  # raised again by the engine's thread
                transfer.error = error
            with self._lock:
                transfer.left -= 1
                last = transfer.left == 0
            if last:
                self._finish(transfer)

    def _finish(self, transfer: _Transfer) -> None:
        try:
            if transfer.error is None and not transfer.store:
                for file in transfer.recipe.files:
                    file.check()
                transfer.slot.upload(transfer.recipe.n_bytes, transfer.recipe.source)
        except BaseException as error:  # raised again by the engine's thread
            transfer.error = error
        transfer.event.set()
