"""Changing the depth while serving: every token is what its depth says of the text before it, and memory adds up."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError, OutOfMemoryError
from engine.llm import LLM
from engine.request import Completion, SamplingParams
from engine.spec import Exit
from tests.engine.serving import ALL_ON_DISK, AMPLE, Served, ids
from tests.engine.test_parity import random_tokens

from .random_heads import WIDTH, Oracle, add_heads

EXITS = [Exit(1, "adapter", WIDTH), Exit(2, "norm")]
PROMPTS = [random_tokens(length, seed=length) for length in (1, 17, 40, 5)]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
DEPTHS = (1, 2, 3)
KEPT = pytest.mark.parametrize("kept", [False, True], ids=["prefilled again", "from kept states"])


@pytest.fixture(scope="module")
def with_heads(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Oracle]]:
    made: dict[str, tuple[Path, Oracle]] = {}

    def get(family: str) -> tuple[Path, Oracle]:
        if family not in made:
            model = shutil.copytree(tiny_model(family), tmp_path_factory.mktemp("exits") / family)
            made[family] = model, Oracle(model, EXITS, add_heads(model, EXITS))
        return made[family]

    return get


@pytest.fixture
def engine(load: Callable[..., Engine]) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(model: Path, **fields: Any) -> Engine:
        made.append(load(model, **{"depth": 1, "kv_tokens": 512} | fields))
        return made[-1]

    yield make
    for each in made:
        assert each.stats().kv_blocks_used == each.stats().running == each.stats().waiting == 0


def check(oracle: Oracle, done: list[Completion]) -> None:
    """Each token is the likeliest at the depth it says it passed, after all tokens before it."""
    for each in done:
        assert each.finish_reason == "length", each.error
        tokens = list(each.prompt_ids)
        for token in each.tokens:
            logits = oracle.logits(tokens)[token.depth]
            assert token.id == int(logits.argmax()), (len(tokens), token.depth)
            tokens.append(token.id)


def depths(done: list[Completion]) -> set[int]:
    return {token.depth for each in done for token in each.tokens}


@KEPT
@pytest.mark.parametrize("family", ["llama", "opt", "qwen2", "mistral-window"])
@pytest.mark.parametrize("way", [(1, 3), (1, 2, 3), (3, 1, 3), (2, 1, 2, 3, 2)])
def test_tokens_are_those_of_the_depth_after_the_same_text(
    with_heads: Callable[[str], tuple[Path, Oracle]],
    engine: Callable[..., Engine],
    family: str,
    way: tuple[int, ...],
    kept: bool,
) -> None:
    model, oracle = with_heads(family)
    serving = engine(model, depth=way[0], keep_states=kept)
    served = Served(serving, PROMPTS, GREEDY)
    for depth in way[1:]:
        for _ in range(3):
            serving.step()
        serving.change_depth(depth)
        assert serving.depth == depth == serving.stats().depth
    done = served.finish()
    check(oracle, done)
    assert depths(done) == set(way)


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    first=st.sampled_from([*DEPTHS, None]),
    changes=st.lists(st.tuples(st.integers(0, 6), st.sampled_from([*DEPTHS, "park"])), max_size=5),
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    fields=st.fixed_dictionaries(
        {
            "max_sequences": st.integers(1, 5),
            "prefill_rows": st.sampled_from([5, 16, 512]),
            "tile_rows": st.sampled_from([8, 33]),
            "kv_tokens": st.sampled_from([80, 128, 512]),
            "keep_states": st.booleans(),
        }
    ),
)
def test_whenever_it_changes(
    with_heads: Callable[[str], tuple[Path, Oracle]],
    first: int | None,
    changes: list[tuple[int, Any]],
    lengths: list[int],
    fields: dict[str, Any],
) -> None:
    model, oracle = with_heads("llama")
    with LLM(model, dtype="float32", threads=1, depth=first, **fields) as llm:
        serving = llm.engine
        tier = serving.tiers["device"]
        served = Served(serving, [random_tokens(length, seed=length) for length in lengths], GREEDY)
        for steps, target in changes:
            for _ in range(steps):
                serving.step()
            if target == "park":
                serving.park()
                assert not serving.step()
            else:
                serving.change_depth(target)
            assert tier.used_bytes <= tier.capacity_bytes
        if serving.depth == 0:
            serving.change_depth(None)
        check(oracle, served.finish())
        assert serving.stats().kv_blocks_used == 0
        assert all(states.pool.free_blocks == states.pool.n_blocks for states in serving.kept.values())


def test_kept_states_spare_the_shallow_layers(
    with_heads: Callable[[str], tuple[Path, Oracle]], engine: Callable[..., Engine]
) -> None:
    """With a prompt of 300 tokens and rows for 16, who prefills again takes sweeps for it, and so do the new layers
    alone; but these compute a third of it."""
    model, _ = with_heads("llama")
    rows = {}
    for kept in (False, True):
        serving = engine(model, depth=2, keep_states=kept)
        served = Served(serving, [random_tokens(300, seed=1)], GREEDY)
        for _ in range(4):
            serving.step()
        counted: list[int] = []
        serving.change_depth(None)
        count_rows(serving, counted)
        serving.step()
        rows[kept] = sum(counted)
        served.finish()
        assert serving.stats().memory.get("boundary", 0) == 0, "given back when all have caught up"
    assert rows[False] == 304 * 3
    assert rows[True] == 303 * 1 + 1 * 3


def count_rows(serving: Engine, counted: list[int]) -> None:
    """Count rows times layers of every sweep."""
    executor = serving._parts.executor
    run = executor.run

    def counting(sweep: Any) -> Any:
        counted.append(sum(share.count for share in sweep.shares) * len(sweep.layers))
        return run(sweep)

    executor.run = counting  # type: ignore[method-assign]


def test_the_ledger_is_that_of_an_engine_that_began_there(
    with_heads: Callable[[str], tuple[Path, Oracle]], engine: Callable[..., Engine]
) -> None:
    model, _ = with_heads("llama")
    began = {depth: engine(model, depth=depth).stats().memory for depth in DEPTHS}
    serving = engine(model, depth=2)
    for depth in (1, 3, 2, 1, 2, 3):
        serving.change_depth(depth)
        assert serving.stats().memory == began[depth]
        serving.park()
        assert {"weights", "kv"}.isdisjoint(serving.stats().memory)
        serving.change_depth(depth)
        assert serving.stats().memory == began[depth]


def test_memory_that_is_freed_goes_to_kv_and_back(
    with_heads: Callable[[str], tuple[Path, Oracle]], engine: Callable[..., Engine]
) -> None:
    model, oracle = with_heads("llama")
    limits = {"memory_bytes": 1_500_000, "kv_tokens": None, "context": 64, "max_sequences": 16, "prefill_rows": 64}
    whole = engine(model, depth=None, **limits)
    few = whole.stats().kv_blocks_total
    served = Served(whole, [random_tokens(20, seed=i) for i in range(12)], GREEDY)
    whole.step()
    whole.change_depth(1)
    many = whole.stats().kv_blocks_total
    assert many > 2 * few
    for _ in range(3):
        whole.step()
    assert whole.stats().kv_blocks_used > few
    before = whole.stats().preemptions
    whole.change_depth(3)
    assert whole.stats().kv_blocks_total <= few + 1
    assert whole.stats().preemptions > before, "the youngest waits"
    done = served.finish()
    check(oracle, done)
    assert depths(done) == {1, 3}


@pytest.mark.parametrize(
    "place",
    [
        {"weights": ALL_ON_DISK, "depth": None},
        {"weights": {"host": ["embedding", "layers.0-2", "head"]}, "depth": None, "host_bytes": AMPLE},
        {"kv_tokens": 0, "kv_disk_tokens": 512},
        {"kv_tokens": 0, "kv_host_tokens": 512, "host_bytes": AMPLE},
        {"kv_tokens": 0, "kv_host_tokens": 512, "host_bytes": AMPLE, "delegate": False},
        {"kv_tokens": 64, "kv_disk_tokens": 512},
        {"kv_dtype": "int4"},
    ],
    ids=[
        "all on disk",
        "all on the host",
        "KV on disk",
        "KV there",
        "KV brought in",
        "KV in two",
        "KV in 4 bits",
    ],
)
@KEPT
def test_wherever_weights_and_kv_lie(
    with_heads: Callable[[str], tuple[Path, Oracle]], engine: Callable[..., Engine], place: dict[str, Any], kept: bool
) -> None:
    model, oracle = with_heads("qwen2")
    serving = engine(model, keep_states=kept, **place)
    began = serving.stats().memory
    first = serving.depth
    served = Served(serving, PROMPTS, GREEDY)
    for depth in (1, 3, 2, 1, first):
        for _ in range(2):
            serving.step()
        serving.change_depth(depth)
    done = served.finish()
    if "kv_dtype" not in place:  # codes are not exact
        check(oracle, done)
    assert {each.finish_reason for each in done} == {"length"}
    assert serving.stats().memory == began


def test_an_exit_with_a_block_of_its_own(
    tiny_model: Callable[[str], Path], tmp_path: Path, engine: Callable[..., Engine]
) -> None:
    model = shutil.copytree(tiny_model("llama"), tmp_path / "block")
    add_heads(model, [Exit(1, "block"), Exit(2, "norm")])
    alone = {depth: engine(model, depth=depth) for depth in (1, 2, 3)}
    serving = engine(model, depth=1)
    served = Served(serving, PROMPTS, GREEDY)
    for depth in (3, 1, 2, 1):
        for _ in range(3):
            serving.step()
        serving.change_depth(depth)
    for each in served.finish():
        for i, token in enumerate(each.tokens):
            known = tuple(t.id for t in each.tokens[:i])
            asked = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            (one,) = Served(alone[token.depth], [[*each.prompt_ids, *known]], asked).finish()
            assert one.tokens[0].id == token.id


@pytest.mark.model
def test_memory_that_is_given_back_is_the_systems_again(smollm2_dir: Path) -> None:
    process = psutil.Process()
    with LLM(smollm2_dir, exits="shared", kv_tokens=8192, threads=1, dtype="bfloat16") as llm:
        llm.generate(["Hello"], SamplingParams(max_tokens=2))
        for _ in range(2):
            uses = llm.engine.stats().memory
            held, before = uses["weights"] + uses["kv"], process.memory_info().rss
            llm.change_depth(10)
            left = llm.engine.stats().memory
            fewer = held - left["weights"] - left["kv"]
            assert before - process.memory_info().rss > 0.8 * fewer
            llm.engine.park()
            assert before - process.memory_info().rss > 0.8 * held
            llm.change_depth(None)


def test_expanding_without_room_is_refused_before_anything(
    with_heads: Callable[[str], tuple[Path, Oracle]], engine: Callable[..., Engine]
) -> None:
    model, oracle = with_heads("llama")
    limits = {"memory_bytes": 620_000, "context": 64, "max_sequences": 2, "prefill_rows": 16, "kv_tokens": 64}
    serving = engine(model, depth=1, **limits)
    before = serving.stats().memory
    served = Served(serving, PROMPTS[:2], GREEDY)
    serving.step()
    with pytest.raises(OutOfMemoryError, match=r"3 layers have no room beside what is served: .* KiB .*Raise"):
        serving.change_depth(3)
    assert serving.stats().memory == before
    done = served.finish()
    check(oracle, done)
    assert depths(done) == {1}


def test_what_cannot_be_read_is_rolled_back(
    with_heads: Callable[[str], tuple[Path, Oracle]], engine: Callable[..., Engine], tmp_path: Path
) -> None:
    plain, oracle = with_heads("llama")
    model = shutil.copytree(plain, tmp_path / "damaged")
    limits = {"memory_bytes": 1_500_000, "kv_tokens": None, "context": 64, "max_sequences": 8, "prefill_rows": 64}
    serving = engine(model, depth=1, keep_states=True, **limits)
    before, blocks = serving.stats().memory, serving.stats().kv_blocks_total
    served = Served(serving, [random_tokens(20, seed=i) for i in range(6)], GREEDY)
    for _ in range(3):
        serving.step()
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError):
        serving.change_depth(3)
    assert (serving.depth, serving.stats().memory, serving.stats().kv_blocks_total) == (1, before, blocks)
    for _ in range(3):
        serving.step()
    weights.write_bytes(content)
    serving.change_depth(3)
    done = served.finish()
    check(oracle, done)
    assert depths(done) == {1, 3}


@pytest.mark.parametrize(
    ("fields", "depth", "words"),
    [
        ({}, 0, "depth is 0, where this model has no exit with a head; it has exits at 1, 2"),
        ({}, 4, "depth is 4; this model has 3 layers"),
        ({"depth": None, "early_exit": True}, 1, "the depth cannot be changed with early_exit"),
        ({"depth": None, "draft_depth": 1}, 1, "the depth cannot be changed with draft_depth"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(
    with_heads: Callable[[str], tuple[Path, Oracle]],
    engine: Callable[..., Engine],
    fields: dict[str, Any],
    depth: int,
    words: str,
) -> None:
    serving = engine(with_heads("llama")[0], **fields)
    with pytest.raises(ConfigError, match=words):
        serving.change_depth(depth)


def test_a_request_cancelled_while_the_model_is_parked_ends(
    with_heads: Callable[[str], tuple[Path, Oracle]], engine: Callable[..., Engine]
) -> None:
    model, oracle = with_heads("llama")
    serving = engine(model)
    served = Served(serving, PROMPTS, GREEDY)
    serving.step()
    serving.park()
    serving.park()
    assert not serving.runs
    serving.cancel(served.requests[0].request_id)
    serving.change_depth(2)
    done = served.finish()
    assert done[0].finish_reason == "cancelled"
    check(oracle, done[1:])
    assert ids(done[1:]) != []
