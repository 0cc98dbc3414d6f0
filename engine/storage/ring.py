"""Read-ahead and write-back: a ring of slots is filled in the order in which the engine will ask for them."""

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from .transfer import Recipe, Transfer, Workers

if TYPE_CHECKING:  # devices are built upon storage
    from ..device.base import Slot

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _Load(Generic[Key]):
    key: Key
    transfer: Transfer


class Ring(Generic[Key]):
    """Slots in use by the engine, filled, or being filled or stored. One thread calls; workers transfer.

    ``acquire`` and ``release`` go in the order announced by ``expect``; keys that are skipped are dropped, a key out
    of order is read when it is asked for. With ``ahead`` false nothing is read before it is asked for.
    """

    def __init__(
        self, slots: Sequence["Slot"], recipe: Callable[[Key], Recipe], workers: Workers, *, ahead: bool = True
    ) -> None:
        """``workers`` are closed with the ring."""
        self._recipe = recipe
        self._workers = workers
        self._ahead = ahead
        self._free = deque(slots)
        self._coming: deque[_Load[Key]] = deque()
        self._used: dict[Key, Slot] = {}
        self._storing: deque[Transfer] = deque()
        self._order: Iterator[Key] = iter(())
        self._announced = 0

    def expect(self, keys: Sequence[Key], then: Sequence[Key] = ()) -> None:
        """The next ``keys`` in order, and after them ``then``, over and over. What is on the way is kept if it fits.

        Everything released before is stored when this returns. Raises what storing it raised.
        """
        self._settle_stores(wait=True)
        self._announced = len(keys) + len(then)
        order = itertools.chain(keys, itertools.cycle(then))
        for load in self._coming:
            if load.key != next(order, None) or load.transfer.error is not None:  # what failed may be read by now
                self._drop_all()
                order = itertools.chain(keys, itertools.cycle(then))
                break
        self._order = order
        self._advance()

    def acquire(self, key: Key) -> "Slot":
        """The slot filled for ``key``; waits only if reading is late. Raises what reading it raised."""
        while self._coming and self._coming[0].key != key:
            self._drop_first()
        if not self._coming:
            self._begin(key)
            if key not in itertools.islice(self._order, self._announced):  # else go on from there
                self._order = iter(())
        transfer = self._coming.popleft().transfer
        transfer.wait()
        slot = transfer.slot
        if transfer.error is not None:
            self._free.append(slot)
            raise transfer.error
        slot.wait()
        self._used[key] = slot
        self._advance()
        return slot

    def release(self, key: Key, store: Recipe | None = None) -> None:
        """Give a slot back, to be filled with what comes next, after it is stored if ``store`` says how."""
        slot = self._used.pop(key)
        slot.retire()
        if store is None or not store.pieces:
            self._free.append(slot)
        else:
            self._storing.append(self._workers.begin(slot, store, store=True))
        self._settle_stores(wait=not self._ahead)
        self._advance()

    def close(self) -> None:
        """Stop. No slot may be in use; what is being stored still is."""
        self._drop_all()
        self._workers.close()

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
        self._coming.append(_Load(key, self._workers.begin(self._free.popleft(), recipe, store=False)))

    def _drop_first(self) -> None:
        transfer = self._coming.popleft().transfer
        transfer.wait()
        self._free.append(transfer.slot)

    def _drop_all(self) -> None:
        while self._coming:
            self._drop_first()

    def _settle_stores(self, wait: bool) -> None:
        while self._storing and (wait or self._storing[0].done):
            self._settle_first_store()

    def _settle_first_store(self) -> None:
        store = self._storing.popleft()
        store.wait()
        self._free.append(store.slot)
        if store.error is not None:
            raise store.error
