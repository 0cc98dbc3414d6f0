"""The ring: every key gets its own bytes, whatever is skipped, asked for out of order, stored or failing."""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from engine.device import CpuDevice, Slot
from engine.errors import CheckpointError
from engine.storage.direct import Bounce, SourceFile
from engine.storage.ring import Ring
from engine.storage.transfer import Recipe, Threads

SIZE = 64
SLOTS = 3
WAIT_S = 10
"""How long a test waits for what must happen."""


class Store:
    """Bytes by key. Its pieces, two for each key, read and write them, note that they did, and fail on request."""

    def __init__(self) -> None:
        self.content: dict[Hashable, Tensor] = {}
        self.began: list[Hashable] = []
        self.failing: set[Hashable] = set()
        self.gate = threading.Event()
        self.gate.set()

    def recipe(self, key: Hashable, store: bool = False) -> Recipe:
        return Recipe(SIZE, [StorePiece(self, key, half, store) for half in (0, 1)])

    def of(self, key: Hashable) -> Tensor:
        return self.content.setdefault(key, torch.full((SIZE,), hash(key) % 251, dtype=torch.uint8))


class StorePiece:
    n_bytes = SIZE // 2

    def __init__(self, owner: Store, key: Hashable, half: int, store: bool) -> None:
        self.owner, self.key, self.store = owner, key, store
        self.place = owner
        self.at = half * SIZE // 2
        self.part = slice(half * SIZE // 2, (half + 1) * SIZE // 2)

    def run(self, host: Tensor, bounce: Bounce) -> None:
        if self.part.start == 0:
            self.owner.began.append(self.key)
        assert self.owner.gate.wait(WAIT_S)
        if self.key in self.owner.failing:
            raise CheckpointError(f"{self.key} cannot be {'stored' if self.store else 'read'}")
        mine, theirs = self.owner.of(self.key)[self.part], host[self.part]
        (mine if self.store else theirs).copy_(theirs if self.store else mine)


def slots(count: int = SLOTS) -> list[Slot]:
    device = CpuDevice(torch.float32, 1)
    return [device.open_slot(SIZE) for _ in range(count)]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def make() -> Iterator[Callable[..., Ring[int]]]:
    made: list[Ring[int]] = []

    def ring(store: Store, count: int = SLOTS, ahead: bool = True) -> Ring[int]:
        made.append(Ring(slots(count), store.recipe, Threads(), ahead=ahead))
        return made[-1]

    yield ring
    for ring_ in made:
        ring_.close()


def visit(ring: Ring[int], store: Store, key: int, write: int | None = None) -> None:
    """Use a key's slot, which must hold the key's bytes, and leave ``write`` in it."""
    content = ring.acquire(key).content
    try:
        assert torch.equal(content, store.of(key)), f"the slot of {key} holds {content[0]}"
        if write is not None:
            content.fill_(write)
    finally:
        ring.release(key, None if write is None else store.recipe(key, store=True))


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_key_of_many_sweeps_gets_its_bytes(
    store: Store, make: Callable[..., Ring[int]], count: int, ahead: bool
) -> None:
    ring = make(store, count, ahead)
    for _ in range(5):
        ring.expect(range(7), then=range(7))
        for key in range(7):
            visit(ring, store, key)


def test_what_was_read_ahead_for_the_next_sweep_is_kept(store: Store, make: Callable[..., Ring[int]]) -> None:
    ring = make(store)
    for _ in range(4):
        ring.expect(range(5), then=range(5))
        for key in range(5):
            visit(ring, store, key)
    assert len(store.began) <= 4 * 5 + SLOTS, "nothing is read twice"


def test_keys_are_read_in_the_order_announced(store: Store, make: Callable[..., Ring[int]]) -> None:
    ring = make(store, 1)
    ring.expect([4, 2, 9, 1])
    for key in (4, 2, 9, 1):
        visit(ring, store, key)
    assert store.began == [4, 2, 9, 1]


def test_the_next_keys_are_read_while_one_is_in_use(store: Store, make: Callable[..., Ring[int]]) -> None:
    ring = make(store)
    ring.expect(range(6))
    ring.acquire(0)
    for load in ring._coming:
        load.transfer.wait()
    assert sorted(store.began) == [0, 1, 2]
    ring.release(0)


def test_without_reading_ahead_nothing_is_read_before_it_is_asked_for(
    store: Store, make: Callable[..., Ring[int]]
) -> None:
    ring = make(store, ahead=False)
    ring.expect(range(6), then=range(6))
    for key in range(6):
        assert store.began == list(range(key))
        visit(ring, store, key)
    assert store.began == list(range(6))


@pytest.mark.parametrize("ahead", [True, False])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_order_of_visits_is_served(ahead: bool, data: st.DataObject) -> None:
    """Skipping, going back, visiting keys that nobody announced, and announcing anew, with writes in between."""
    store = Store()
    ring: Ring[int] = Ring(slots(data.draw(st.integers(1, 4))), store.recipe, Threads(), ahead=ahead)
    keys = st.lists(st.integers(0, 6), max_size=8)
    try:
        for round_ in range(3):
            ring.expect(data.draw(keys), data.draw(keys))
            for key in data.draw(keys):
                visit(ring, store, key)
            ring.expect([])  # nothing that is written below may be on its way
            for key in set(data.draw(keys)):
                visit(ring, store, key, write=100 + round_)
    finally:
        ring.close()


def test_a_skipped_key_is_dropped_and_the_rest_still_read_ahead(store: Store, make: Callable[..., Ring[int]]) -> None:
    ring = make(store)
    ring.expect(range(8))
    visit(ring, store, 0)
    visit(ring, store, 4)
    assert [load.key for load in ring._coming] == [5, 6, 7]
    visit(ring, store, 5)


def test_a_key_out_of_order_is_read_when_it_is_asked_for(store: Store, make: Callable[..., Ring[int]]) -> None:
    ring = make(store)
    ring.expect(range(4))
    visit(ring, store, 99)
    visit(ring, store, 2)
    ring.expect(range(4))
    for key in range(4):
        visit(ring, store, key)


def test_an_error_is_raised_where_its_key_is_asked_for_and_the_ring_goes_on(
    store: Store, make: Callable[..., Ring[int]]
) -> None:
    ring = make(store)
    store.failing = {2}
    ring.expect(range(5), then=range(5))
    visit(ring, store, 0)
    visit(ring, store, 1)
    with pytest.raises(CheckpointError, match="2 cannot be read"):
        ring.acquire(2)
    visit(ring, store, 3)
    store.failing = set()
    for _ in range(2):
        ring.expect(range(5), then=range(5))
        for key in range(5):
            visit(ring, store, key)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_could_not_be_read_ahead_is_read_again_for_the_next_sweep(
    store: Store, make: Callable[..., Ring[int]], failing: int
) -> None:
    ring = make(store)
    store.failing = {failing}
    ring.expect(range(3), then=range(3))
    for load in ring._coming:
        load.transfer.wait()
    store.failing = set()
    ring.expect(range(3), then=range(3))
    for key in range(3):
        visit(ring, store, key)


@pytest.mark.parametrize("ahead", [True, False])
def test_errors_cost_no_slots(store: Store, make: Callable[..., Ring[int]], ahead: bool) -> None:
    ring = make(store, ahead=ahead)
    store.failing = set(range(5))
    for _ in range(3 * SLOTS):
        ring.expect(range(5), then=range(5))
        with pytest.raises(CheckpointError):
            ring.acquire(0)
    ring.expect([])
    assert len(ring._free) == SLOTS


def test_what_was_stored_is_read_back_after_the_next_expect(store: Store, make: Callable[..., Ring[int]]) -> None:
    ring = make(store)
    for round_ in range(1, 20):
        ring.expect(range(3))
        for key in range(3):
            assert bool((store.of(key) == round_ - 1).all()) or round_ == 1
            visit(ring, store, key, write=round_)


def test_expect_returns_only_when_everything_is_stored(store: Store, make: Callable[..., Ring[int]]) -> None:
    ring = make(store)
    ring.expect([0])
    ring.acquire(0).content.fill_(42)
    store.gate.clear()
    ring.release(0, store.recipe(0, store=True))
    opener = threading.Timer(0.02, store.gate.set)
    opener.start()
    ring.expect([])
    assert bool((store.of(0) == 42).all())
    opener.join()


def test_a_slot_that_is_being_stored_is_not_filled_again(store: Store, make: Callable[..., Ring[int]]) -> None:
    ring = make(store, 2)
    ring.expect(range(4))
    visit(ring, store, 0, write=100)
    for key in (1, 2, 3):
        visit(ring, store, key, write=100 + key)
    ring.expect([])
    assert [int(store.of(key)[0]) for key in range(4)] == [100, 101, 102, 103]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_store_that_fails_is_told_by_the_next_expect_at_the_latest_and_the_ring_goes_on(
    store: Store, make: Callable[..., Ring[int]], ahead: bool
) -> None:
    ring = make(store, ahead=ahead)
    ring.expect([0, 1])
    ring.acquire(0)
    store.failing = {0}

    def store_and_announce() -> None:
        ring.release(0, store.recipe(0, store=True))
        ring.expect([])

    with pytest.raises(CheckpointError, match="0 cannot be stored"):
        store_and_announce()
    store.failing = set()
    ring.expect([])
    assert len(ring._free) == SLOTS
    ring.expect([0, 1])
    visit(ring, store, 0, write=3)
    visit(ring, store, 1)
    ring.expect([])
    assert int(store.of(0)[0]) == 3


def test_a_file_that_was_changed_is_told_when_its_key_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(SIZE))
    file = SourceFile(tmp_path / "weights")
    ring: Ring[int] = Ring(slots(), lambda _: Recipe(SIZE, files=(file,)), Threads())
    ring.expect([0])
    ring.acquire(0)
    ring.release(0)
    (tmp_path / "weights").write_bytes(b"more than before" * SIZE)
    ring.expect([1])
    with pytest.raises(CheckpointError, match="was changed"):
        ring.acquire(1)
    ring.close()
    file.close()


def test_a_slot_is_filled_from_memory_too() -> None:
    source = torch.arange(SIZE, dtype=torch.uint8)
    ring: Ring[int] = Ring(slots(), lambda _: Recipe(SIZE, source=source), Threads())
    ring.expect(range(5))
    for key in range(5):
        assert torch.equal(ring.acquire(key).content, source)
        ring.release(key)
    ring.close()


@pytest.mark.parametrize("keys", [[], [0, 1, 2, 3]])
def test_closing_joins_the_threads(store: Store, keys: Sequence[int]) -> None:
    workers = Threads()
    ring: Ring[int] = Ring(slots(), store.recipe, workers)
    threads = workers._threads
    ring.expect(keys, then=keys)
    ring.close()
    assert not any(thread.is_alive() for thread in threads)


def test_what_is_being_stored_when_the_ring_closes_is_stored(store: Store) -> None:
    ring: Ring[int] = Ring(slots(), store.recipe, Threads())
    ring.expect([0])
    ring.acquire(0).content.fill_(9)
    ring.release(0, store.recipe(0, store=True))
    ring.close()
    assert bool((store.of(0) == 9).all())
