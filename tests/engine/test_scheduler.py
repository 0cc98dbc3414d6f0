"""The scheduler's bookkeeping, with sweeps that only pretend to compute."""

import hypothesis.strategies as st
from hypothesis import given

from engine.kv import BLOCK, LayerLengths, blocks_for
from engine.request import Request, Token
from engine.scheduler import Scheduler
from engine.sequence import Sequence, Status
from tests.engine.homes import resident

LAYERS = range(2)


def sequence(n_prompt: int) -> Sequence:
    request = Request(str(n_prompt), tuple(range(n_prompt)))
    return Sequence(
        request=request,
        params=request.params,
        deliver=lambda _: None,
        kv=LayerLengths(len(LAYERS)),
        text=None,  # type: ignore[arg-type]  # the scheduler does not look at text
        stop=None,  # type: ignore[arg-type]
        tokens=list(request.prompt_ids),
    )


def sweep(scheduler: Scheduler) -> list[Sequence]:
    """Schedule and pretend to compute; returns the sequences that got a token."""
    sampled = []
    for share in scheduler.schedule():
        assert len(share.sequence.blocks) >= blocks_for(share.start + share.count)
        share.sequence.kv.set(LAYERS, share.start + share.count)
        if share.logit_rows:
            share.sequence.append(Token(1, 0.0, 1.0))
            sampled.append(share.sequence)
    return sampled


@given(
    prompts=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 150)), min_size=1, max_size=12),
    n_blocks=st.integers(30, 80),
    prefill_rows=st.integers(1, 200),
    max_sequences=st.integers(1, 8),
)
def test_every_sequence_finishes_and_every_block_comes_back(
    prompts: list[tuple[int, int]], n_blocks: int, prefill_rows: int, max_sequences: int
) -> None:
    home = resident(n_blocks)
    pool = home.pool
    scheduler = Scheduler([home], LAYERS, max_sequences, prefill_rows)
    wanted = {}
    for n_prompt, n_output in prompts:
        made = sequence(n_prompt)
        wanted[made] = min(n_output, n_blocks * BLOCK - n_prompt)
        scheduler.add(made)
    for _ in range(20_000):
        assert len(scheduler.running) <= max_sequences
        owned = [block for s in scheduler.running for block in s.blocks]
        assert len(set(owned)) == len(owned) == n_blocks - pool.free_blocks
        for done in sweep(scheduler):
            if len(done.output) >= wanted[done]:
                scheduler.remove(done)
        if all(s.status is Status.FINISHED for s in wanted):
            break
    assert all(s.status is Status.FINISHED for s in wanted)
    assert pool.free_blocks == n_blocks


def test_decoding_sequences_take_part_in_every_sweep_while_a_long_prompt_is_prefilled() -> None:
    scheduler = Scheduler([resident(40)], LAYERS, max_sequences=4, prefill_rows=16)
    first, long = sequence(4), sequence(200)
    scheduler.add(first)
    sweep(scheduler)
    scheduler.add(long)
    while not long.output:
        before = len(first.output)
        sweep(scheduler)
        assert len(first.output) == before + 1


def test_sequences_start_in_order_of_arrival() -> None:
    scheduler = Scheduler([resident(32)], LAYERS, max_sequences=1, prefill_rows=64)
    for n_prompt in (3, 1, 2):
        scheduler.add(sequence(n_prompt))
    order = []
    while scheduler.waiting or scheduler.running:
        for done in sweep(scheduler):
            order.append(done.n_prompt)
            scheduler.remove(done)
    assert order == [3, 1, 2]
