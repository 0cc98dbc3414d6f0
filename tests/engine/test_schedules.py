"""FlexGen's block schedules: what they hold in KV is what the paper's formulas say, and they change no token."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from engine.config import Schedule
from engine.kv import BlockPool, LayerLengths, blocks_for
from engine.kv_homes import KVHome
from engine.llm import LLM
from engine.request import Request, SamplingParams, Token
from engine.scheduler import Scheduler
from engine.sequence import Sequence, Status
from tests.engine.test_parity import random_tokens

TinyModel = Callable[[str], Path]
LAYERS = range(1)
UNLIMITED = 5000


class Blocks:
    """A home that is only a pool."""

    def __init__(self, n_blocks: int) -> None:
        self.pool = BlockPool(n_blocks)
        self.reserves = False


def sequence(name: int, s: int, n: int) -> Sequence:
    """A prompt of ``s`` tokens that is to get ``n`` more."""
    request = Request(str(name), (5,) * s, SamplingParams(max_tokens=n))
    return Sequence(
        request=request,
        params=request.params,
        deliver=lambda _: None,
        kv=LayerLengths(1),
        text=cast(Any, None),  # the scheduler does not look at text
        stop=cast(Any, None),
        tokens=list(request.prompt_ids),
    )


@dataclass
class Job:
    """What was seen while a schedule served many equal requests, ``block`` of them begun at any time."""

    sweeps: int = 0
    preemptions: int = 0
    most_running: int = 0
    most_held: int = 0
    """Positions with KV at the end of a sweep, before those that are done leave."""
    most_tokens: int = 0
    """Tokens of those that go on: the positions that the next sweep will have KV for."""
    joined: list[int] | None = None
    """Sequences that ran for the first time, sweep by sweep."""


def run(
    schedule: Schedule, block: int, s: int, n: int, count: int, n_blocks: int = UNLIMITED, prefill_rows: int = UNLIMITED
) -> Job:
    scheduler = Scheduler([cast(KVHome, Blocks(n_blocks))], LAYERS, block, prefill_rows, schedule)
    waiting = [sequence(i, s, n) for i in range(count)][::-1]
    begun = 0
    job = Job(joined=[])
    while waiting or begun:
        while waiting and begun < block:
            scheduler.add(waiting.pop())
            begun += 1
        shares = scheduler.schedule()
        assert shares or not scheduler.running, "somebody can always go on"
        assert job.joined is not None
        job.joined.append(sum(share.start == 0 for share in shares))
        for share in shares:
            share.sequence.kv.set(LAYERS, share.start + share.count)
            if share.logit_rows:
                share.sequence.append(Token(1, 0.0, 1.0))
        job.most_running = max(job.most_running, len(scheduler.running))
        job.most_held = max(job.most_held, sum(each.kv.of(LAYERS) for each in scheduler.running))
        for done in [each for each in scheduler.running if len(each.output) == n]:
            scheduler.remove(done)
            begun -= 1
        job.most_tokens = max(job.most_tokens, sum(len(each.tokens) for each in scheduler.running))
        job.sweeps += 1
        assert job.sweeps < 50 * n + 50 * count, "no progress"
    job.preemptions = scheduler.preemptions
    return job


@pytest.mark.parametrize(("s", "n"), [(64, 32), (10, 50), (1, 8), (33, 1)])
@pytest.mark.parametrize("block", [1, 7, 32])
def test_a_zigzag_block_holds_all_its_sequences_at_full_length(block: int, s: int, n: int) -> None:
    job = run("zigzag", block, s, n, 3 * block)
    assert job.most_held == block * (s + n - 1)  # the last token is sampled, not attended to
    assert job.sweeps == 3 * n


@pytest.mark.parametrize(("s", "n"), [(64, 32), (10, 50), (1, 8), (100, 2)])
@pytest.mark.parametrize("per_sweep", [1, 2, 3])
def test_a_diagonal_block_holds_what_the_paper_derives(per_sweep: int, s: int, n: int) -> None:
    """``bls * (2s + n) * (n - 1) / (2n)`` positions; with those that leave at the end of the sweep, one round more."""
    block = per_sweep * n
    job = run("diagonal", block, s, n, 5 * block)
    assert job.most_tokens * 2 * n == block * (2 * s + n) * (n - 1)
    assert job.most_held * 2 == block * (2 * s + n - 1)
    assert job.most_running == block


@pytest.mark.parametrize(("block", "n"), [(10, 32), (20, 32), (48, 32), (100, 64), (5, 7), (7, 5), (12, 512)])
def test_a_diagonal_block_fills_though_its_size_is_no_multiple_of_the_output(block: int, n: int) -> None:
    job = run("diagonal", block, 64, n, 5 * block)
    assert job.most_running == block
    assert job.most_tokens == pytest.approx(block * (128 + n) * (n - 1) / (2 * n), rel=0.07, abs=64 + n)


def test_a_diagonal_block_takes_in_as_many_in_every_sweep() -> None:
    joined = run("diagonal", 48, 16, 32, 480).joined
    assert joined is not None
    steady = joined[40:200]
    assert set(steady) == {1, 2}
    assert sum(steady) == pytest.approx(1.5 * len(steady), abs=2)


@pytest.mark.parametrize(("s", "n", "block"), [(256, 256, 24), (512, 512, 12), (64, 256, 24)])
def test_a_diagonal_block_is_larger_in_the_pool_that_zigzag_just_fills(s: int, n: int, block: int) -> None:
    n_blocks = block * blocks_for(s + n - 1)
    zigzag = run("zigzag", block, s, n, 2 * block, n_blocks)
    assert zigzag.preemptions == 0
    assert run("zigzag", block, s, n, 2 * block, n_blocks - 1).preemptions > 0, "the pool is just enough"
    larger = int(0.97 * block * (2 * s + 2 * n) / (2 * s + n))  # a sequence's last block is half empty
    count = 4 * larger
    diagonal = run("diagonal", larger, s, n, count, n_blocks)
    assert diagonal.preemptions == 0
    assert diagonal.most_running >= larger - 1
    assert larger > 1.2 * block


@pytest.mark.parametrize("prefill_rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("schedule", ["continuous", "zigzag", "diagonal"])
def test_every_schedule_ends_whatever_the_pool(schedule: Schedule, prefill_rows: int) -> None:
    for n_blocks in (6, 11, 40):
        job = run(schedule, 5, 40, 30, 12, n_blocks, prefill_rows)
        assert job.most_held <= n_blocks * 16


def test_zigzag_decodes_together() -> None:
    """Nobody decodes before the last prompt of the block is done, so all of the block end in one sweep."""
    scheduler = Scheduler([cast(KVHome, Blocks(100))], LAYERS, 4, 20, "zigzag")
    block = [sequence(i, 30, 5) for i in range(4)]
    for each in block:
        scheduler.add(each)
    for _ in range(40):
        if not scheduler.running and not scheduler.waiting:
            break
        for share in scheduler.schedule():
            share.sequence.kv.set(LAYERS, share.start + share.count)
            if share.logit_rows:
                share.sequence.append(Token(1, 0.0, 1.0))
        lengths = {len(each.output) for each in block}
        assert max(lengths) <= 1 or len(lengths) == 1
        if lengths == {5}:
            for each in block:
                scheduler.remove(each)
    assert all(each.status is Status.FINISHED for each in block)


GREEDY = [SamplingParams(temperature=0, max_tokens=6 + 3 * i, ignore_eos=True) for i in range(9)]
PROMPTS = [random_tokens(length, seed=length) for length in (3, 70, 20, 1, 16, 45, 33, 8, 90)]


@pytest.mark.parametrize("schedule", ["zigzag", "diagonal"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kv_tokens": 160, "context": 128},
        {"kv_tokens": 0, "kv_disk_tokens": 600, "context": 128},
        {
            "kv_tokens": 64,
            "kv_disk_tokens": 300,
            "context": 128,
            "weights": {"disk": ["embedding", "layers.0-2", "head"]},
        },
    ],
)
def test_schedules_change_no_token(
    tiny_model: TinyModel, tmp_path: Path, schedule: Schedule, fields: dict[str, Any]
) -> None:
    def tokens(**config: Any) -> list[list[int]]:
        with LLM(str(tiny_model("llama")), dtype="float32", threads=1, max_sequences=4, **config) as llm:
            return [[token.id for token in each.tokens] for each in llm.generate(PROMPTS, GREEDY)]

    expected = tokens()
    for prefill_rows in (24, 512):
        got = tokens(schedule=schedule, prefill_rows=prefill_rows, offload_dir=str(tmp_path), **fields)
        assert got == expected
