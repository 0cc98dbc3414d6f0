"""Read-ahead and write-back: threads fill a ring of slots in the order in which the engine will ask for them."""

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from ..device import Slot
from .direct import Bounce, SourceFile

Key = TypeVar("Key", bound=Hashable)
WORKERS = 3
"""Threads that read and write: enough for the disk's full speed with pieces of PIECE_BYTES."""


class Piece(Protocol):
    """A part of a transfer that one thread does."""

    def run(self, host: Tensor, bounce: Bounce) -> None:
        """Fill, or store, this piece's bytes of a slot's ``host``."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a slot is filled or stored: by pieces of its host memory, or filled by a copy of ``source``."""

    n_bytes: int
    pieces: Sequence[Piece] = ()
    source: Tensor | None = None
    files: Sequence[SourceFile] = ()
    """Files that must be found unchanged once the pieces are read."""


@dataclass(slots=True, eq=False)
class _Transfer(Generic[Key]):
    key: Key
    slot: Slot
    recipe: Recipe
    store: bool
    left: int
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Ring(Generic[Key]):
    """Slots in use by the engine, filled, or being filled or stored. One thread calls; WORKERS of its own transfer.

    ``acquire`` and ``release`` go in the order announced by ``expect``; keys that are skipped are dropped, a key out
    of order is read when it is asked for. With ``ahead`` false nothing is read before it is asked for.
    """

    def __init__(
        self, slots: Sequence[Slot], recipe: Callable[[Key], Recipe], *, workers: int = WORKERS, ahead: bool = True
    ) -> None:
        self._recipe = recipe
        self._ahead = ahead
        self._free = deque(slots)
        self._coming: deque[_Transfer[Key]] = deque()
        self._used: dict[Key, Slot] = {}
        self._storing: deque[_Transfer[Key]] = deque()
        self._order: Iterator[Key] = iter(())
        self._announced = 0
        self._jobs: queue.SimpleQueue[tuple[_Transfer[Key], Piece | None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, name=f"helios-io-{i}", daemon=True) for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def expect(self, keys: Sequence[Key], then: Sequence[Key] = ()) -> None:
        """The next ``keys`` in order, and after them ``then``, over and over. What is on the way is kept if it fits.

        Everything released before is stored when this returns. Raises what storing it raised.
        """
        self._settle_stores(wait=True)
        self._announced = len(keys) + len(then)
        order = itertools.chain(keys, itertools.cycle(then))
        for load in self._coming:
            if load.key != next(order, None) or load.error is not None:  # what failed may be read by now
                self._drop_all()
                order = itertools.chain(keys, itertools.cycle(then))
                break
        self._order = order
        self._advance()

    def acquire(self, key: Key) -> Slot:
        """The slot filled for ``key``; waits only if reading is late. Raises what reading it raised."""
        while self._coming and self._coming[0].key != key:
            self._drop_first()
        if not self._coming:
            self._begin(key)
            if key not in itertools.islice(self._order, self._announced):  # else go on from there
                self._order = iter(())
        load = self._coming.popleft()
        load.done.wait()
        if load.error is not None:
            self._free.append(load.slot)
            raise load.error
        load.slot.wait()
        self._used[key] = load.slot
        self._advance()
        return load.slot

    def release(self, key: Key, store: Recipe | None = None) -> None:
        """Give a slot back, to be filled with what comes next, after it is stored if ``store`` says how."""
        slot = self._used.pop(key)
        slot.retire()
        if store is None or not store.pieces:
            self._free.append(slot)
        else:
            transfer = _Transfer(key, slot, store, store=True, left=len(store.pieces))
            self._storing.append(transfer)
            for piece in store.pieces:
                self._jobs.put((transfer, piece))
        self._settle_stores(wait=not self._ahead)
        self._advance()

    def close(self) -> None:
        """Stop. No slot may be in use; what is being stored still is."""
        self._drop_all()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _advance(self) -> None:
        while self._ahead and self._free:
            key = next(self._order, None)
            if key is None:
                return
            self._begin(key)

    def _begin(self, key: Key) -> None:
        while not self._free:  # all others are being stored
            self._settle_first_store()
        recipe = self._recipe(key)
        load = _Transfer(key, self._free.popleft(), recipe, store=False, left=max(1, len(recipe.pieces)))
        self._coming.append(load)
        for piece in recipe.pieces or (None,):
            self._jobs.put((load, piece))

    def _drop_first(self) -> None:
        load = self._coming.popleft()
        load.done.wait()
        self._free.append(load.slot)

    def _drop_all(self) -> None:
        while self._coming:
            self._drop_first()

    def _settle_stores(self, wait: bool) -> None:
        while self._storing and (wait or self._storing[0].done.is_set()):
            self._settle_first_store()

    def _settle_first_store(self) -> None:
        store = self._storing.popleft()
        store.done.wait()
        self._free.append(store.slot)
        if store.error is not None:
            raise store.error

    def _work(self) -> None:
        bounce = Bounce()
        while (job := self._jobs.get()) is not None:
            transfer, piece = job
            try:
                if piece is not None and transfer.error is None:
                    if transfer.store:
                        transfer.slot.download(transfer.recipe.n_bytes)
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

    def _finish(self, transfer: _Transfer[Key]) -> None:
        try:
            if transfer.error is None and not transfer.store:
                for file in transfer.recipe.files:
                    file.check()
                transfer.slot.upload(transfer.recipe.n_bytes, transfer.recipe.source)
        except BaseException as error:  # raised again by the engine's thread
            transfer.error = error
        transfer.done.set()
