"""KV blocks: what is written is what is gathered, and lengths per layer range."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from engine.errors import OutOfMemoryError
from engine.kv import BLOCK, BlockPool, KVFormat, LayerLengths, blocks_for
from tests.engine.homes import SPEC, cpu_tier, resident


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(0, 50)), max_size=8), st.integers(0, 60))
def test_lengths_of_layer_ranges_follow_a_plain_list(steps: list[tuple[int, int, int]], cut: int) -> None:
    lengths, plain = LayerLengths(6), [0] * 6
    for lo, hi, length in steps:
        if lo < hi:
            lengths.set(range(lo, hi), length)
            plain[lo:hi] = [length] * (hi - lo)
    lengths.cut(cut)
    plain = [min(length, cut) for length in plain]
    for lo in range(6):
        for hi in range(lo + 1, 7):
            assert lengths.of(range(lo, hi)) == min(plain[lo:hi])


def test_what_is_written_is_gathered_whatever_the_order_of_blocks() -> None:
    home = resident(7, scratch_blocks=6)
    layout, tables, lengths = home.layout, [[5, 0, 3], [2, 6]], [40, 20]
    written = []
    with home.open(1, 0) as pool:
        for table, length in zip(tables, lengths, strict=True):
            heads = torch.randn(length, 2, SPEC.n_kv_heads, SPEC.head_dim)
            positions = np.arange(length)
            rows = layout.write_rows(np.array(table)[positions // BLOCK], positions)
            layout.write(pool, torch.from_numpy(rows), heads.reshape(-1, SPEC.head_dim))
            written.append(heads)
        padded = np.array([[5, 0, 3], [2, 6, 0]])
        keys, values = layout.gather(pool, torch.from_numpy(layout.gather_rows(padded)), sequences=2)
    for i, (heads, length) in enumerate(zip(written, lengths, strict=True)):
        assert torch.equal(keys[i, :, :length], heads[:, 0].transpose(0, 1))
        assert torch.equal(values[i, :, :length], heads[:, 1].transpose(0, 1))


def test_a_pool_gives_neighbours_where_it_can() -> None:
    pool = BlockPool(10)
    first, second = pool.take(2), pool.take(3)
    pool.take(5)
    pool.give_back(first)
    pool.give_back(second[::-1])
    assert pool.take(3) == [0, 1, 2]
    pool.give_back([7, 9])
    assert pool.take(2) == [3, 4]
    assert pool.take(2) == [7, 9]


def test_a_pool_gives_all_that_was_asked_or_nothing() -> None:
    pool = BlockPool(3)
    taken = pool.take(2)
    with pytest.raises(OutOfMemoryError, match=r"2 blocks.*1 of 3"):
        pool.take(2)
    assert pool.free_blocks == 1
    pool.give_back(taken)
    assert sorted(pool.take(3)) == [0, 1, 2]


def test_the_ledger_agrees_with_the_pools_to_the_byte() -> None:
    tier = cpu_tier()
    home = resident(5, n_layers=3, dtype=torch.bfloat16, tier=tier)
    pools = []
    for layer in range(3):
        with home.open(layer, 0) as pool:
            pools.append(pool)
    assert tier.by_use()["kv"] == 3 * 5 * KVFormat(SPEC, torch.bfloat16).block_bytes == sum(t.nbytes for t in pools)


def test_a_tier_refuses_what_does_not_fit_and_takes_nothing() -> None:
    tier = cpu_tier(1000)
    kept = tier.allocate((100,), torch.float32, "weights")
    with pytest.raises(OutOfMemoryError, match=r"'device' has 600 B left.*800 B more.*kv"):
        tier.allocate((200,), torch.float32, "kv")
    assert tier.used_bytes == 400
    tier.free(kept)
    assert tier.free_bytes == 1000


@pytest.mark.parametrize(("positions", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for(positions: int, blocks: int) -> None:
    assert blocks_for(positions) == blocks


def test_pools_start_finite_since_masked_positions_are_multiplied_by_zero() -> None:
    with resident(5).open(0, 0) as pool:
        assert not pool.any()
