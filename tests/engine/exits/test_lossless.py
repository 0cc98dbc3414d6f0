"""Lossless mode: drafts at an exit, verified by the deeper layers: the whole model's output, greedy and sampled."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError, InvalidRequestError
from engine.llm import LLM
from engine.request import SamplingParams
from engine.spec import Exit
from tests.engine.serving import AMPLE, Served, ids
from tests.engine.test_parity import random_tokens

from .random_heads import WIDTH, add_heads

EXITS = [Exit(1, "adapter", WIDTH), Exit(2, "norm")]
PROMPTS = [random_tokens(length, seed=length) for length in (1, 17, 40, 5)]
DEEP_ON_DISK = {"device": ["embedding", "layers.0", "head"], "disk": ["layers.1-2"]}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose exits say something else than its last layer, now and then the same."""
    copy = shutil.copytree(tiny_model("llama"), tmp_path_factory.mktemp("lossless") / "llama")
    add_heads(copy, EXITS)
    return copy


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(model: Path, **config: Any) -> LLM:
        fields = {"dtype": "float32", "threads": 1, "memory_bytes": AMPLE, "kv_tokens": 512}
        made.append(LLM(model, offload_dir=str(tmp_path / "offload"), **fields | config))
        return made[-1]

    yield make
    for each in made:
        stats = each.engine.stats()
        assert stats.kv_blocks_used == stats.running == stats.waiting == 0
        assert all(store.pool.free_blocks == store.pool.n_blocks for store in each.engine.kept.values())
        each.close()


def params(count: int, **fields: Any) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=14, seed=i, ignore_eos=True, **fields) for i in range(count)]


SAMPLED = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "with everything": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "min_tokens": 4},
}


@pytest.mark.parametrize("how", SAMPLED)
@pytest.mark.parametrize("family", ["llama", "opt", "qwen2", "mistral-window"])
def test_the_output_is_the_whole_models(
    tiny_model: Callable[[str], Path], tmp_path: Path, llm: Callable[..., LLM], family: str, how: str
) -> None:
    copy = shutil.copytree(tiny_model(family), tmp_path / family)
    add_heads(copy, EXITS)
    asked = params(len(PROMPTS), **SAMPLED[how])
    whole = llm(copy).generate(PROMPTS, asked)
    for depth in (1, 2):
        engine = llm(copy, draft_depth=depth)
        done = engine.generate(PROMPTS, asked)
        assert ids(done) == ids(whole)
        assert [each.text for each in done] == [each.text for each in whole]
        assert [each.usage.depth for each in done] == [3] * len(done)
        assert engine.engine.stats().drafted_tokens > 0


@settings(derandomize=True, deadline=None, max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    temperature=st.sampled_from([0.0, 0.05, 1.0]),
    fields=st.fixed_dictionaries(
        {
            "draft_depth": st.sampled_from([1, 2]),
            "draft_tokens": st.integers(1, 6),
            "max_sequences": st.integers(1, 6),
            "prefill_rows": st.sampled_from([5, 16, 512]),
            "tile_rows": st.sampled_from([8, 33]),
            "kv_tokens": st.sampled_from([80, 112, 512]),
        }
    ),
)
def test_whatever_the_batches_and_the_drafts(
    model: Path, lengths: list[int], temperature: float, fields: dict[str, int]
) -> None:
    prompts = [random_tokens(length, seed=length) for length in lengths]
    asked = params(len(prompts), temperature=temperature)
    with LLM(model, dtype="float32", threads=1) as whole, LLM(model, dtype="float32", threads=1, **fields) as engine:
        assert ids(engine.generate(prompts, asked)) == ids(whole.generate(prompts, asked))
        assert engine.engine.stats().kv_blocks_used == 0


def test_right_drafts_are_taken_and_shallow_layers_are_never_recomputed(
    tiny_model: Callable[[str], Path], tmp_path: Path, llm: Callable[..., LLM]
) -> None:
    """With a head that says what the last layer says (its layers are made to do nothing), every draft is right."""
    copy = shutil.copytree(tiny_model("llama"), tmp_path / "idle")
    silence(copy, layers=(1, 2))
    whole = llm(copy)
    engine = llm(copy, draft_depth=1, exits="shared", draft_tokens=4)
    asked = params(1, temperature=0.0)[0]
    expected = whole.generate(PROMPTS, asked)
    done = engine.generate(PROMPTS, asked)
    assert ids(done) == ids(expected)
    stats, whole_stats = engine.engine.stats(), whole.engine.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 0
    assert stats.sweeps < whole_stats.sweeps
    # Every position passes each segment once, but for the last token, of which nothing is wanted.
    positions = sum(len(prompt) + 14 - 1 for prompt in PROMPTS)
    assert stats.segment_rows == (positions, positions)


def test_rows_below_are_computed_once_for_each_token_that_was_tried(model: Path, llm: Callable[..., LLM]) -> None:
    engine = llm(model, draft_depth=1, draft_tokens=3)
    engine.generate(PROMPTS, params(len(PROMPTS), temperature=0.0))
    stats = engine.engine.stats()
    shallow, deep = stats.segment_rows
    wrong = stats.drafted_tokens - stats.accepted_tokens
    positions = sum(len(prompt) + 14 - 1 for prompt in PROMPTS)
    assert wrong > 0
    assert shallow <= positions + wrong
    assert deep <= positions + wrong


def test_deep_layers_on_disk_are_read_once_for_several_tokens(
    tiny_model: Callable[[str], Path], tmp_path: Path, llm: Callable[..., LLM]
) -> None:
    copy = shutil.copytree(tiny_model("llama"), tmp_path / "idle")
    silence(copy, layers=(1, 2))
    asked = params(1, temperature=0.0)[0]
    whole = llm(copy, weights=DEEP_ON_DISK)
    engine = llm(copy, weights=DEEP_ON_DISK, draft_depth=1, exits="shared", draft_tokens=4)
    assert ids(engine.generate(PROMPTS, asked)) == ids(whole.generate(PROMPTS, asked))
    assert engine.engine.stats().sweeps <= whole.engine.stats().sweeps // 3


@pytest.mark.parametrize(
    "place",
    [{"kv_tokens": 0, "kv_disk_tokens": 512}, {"kv_tokens": 0, "kv_host_tokens": 512, "host_bytes": AMPLE}],
    ids=["KV on disk", "KV on the host"],
)
def test_wherever_kv_lies(model: Path, llm: Callable[..., LLM], place: dict[str, Any]) -> None:
    asked = params(len(PROMPTS), temperature=0.7)
    whole = ids(llm(model).generate(PROMPTS, asked))
    assert ids(llm(model, draft_depth=1, weights=DEEP_ON_DISK, **place).generate(PROMPTS, asked)) == whole


def test_a_draft_that_is_not_sure_is_the_last(model: Path, llm: Callable[..., LLM]) -> None:
    asked = params(len(PROMPTS), temperature=0.0)
    eager, careful = (llm(model, draft_depth=1, draft_tokens=6, exit_threshold=th) for th in (0.0, 1.0))
    assert ids(eager.generate(PROMPTS, asked)) == ids(careful.generate(PROMPTS, asked))
    assert careful.engine.stats().drafted_tokens < eager.engine.stats().drafted_tokens


def test_stops_and_limits_fall_where_they_would(model: Path, llm: Callable[..., LLM]) -> None:
    whole = llm(model)
    (free,) = whole.generate(PROMPTS[1], params(1, temperature=0.0))
    stop = free.tokens[6].id
    for limit in (1, 2, 5, 9):
        asked = SamplingParams(temperature=0, max_tokens=limit, stop_token_ids=(stop,), ignore_eos=True)
        (expected,) = whole.generate(PROMPTS[1], asked)
        (done,) = llm(model, draft_depth=2).generate(PROMPTS[1], asked)
        assert (ids([done]), done.finish_reason) == (ids([expected]), expected.finish_reason)


def test_a_request_cancelled_between_steps_leaves_nothing(model: Path, llm: Callable[..., LLM]) -> None:
    engine = llm(model, draft_depth=1).engine
    served = Served(engine, PROMPTS, params(1, temperature=0.0)[0])
    for _ in range(3):
        engine.step()
    engine.cancel(served.requests[1].request_id)
    done = served.finish()
    assert [each.finish_reason for each in done] == ["length", "cancelled", "length", "length"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"draft_depth": 3}, "draft_depth is 3, all layers of this model"),
        ({"draft_depth": 4}, "draft_depth is 4, where this model has no exit with a head; it has exits at 1, 2"),
        ({"draft_depth": 0}, "draft_depth is 0; it must be at least 1"),
        ({"draft_depth": 1, "draft_tokens": 0}, "draft_tokens is 0; it must be at least 1"),
        ({"draft_depth": 1, "depth": 2}, "draft_depth is set and depth is 2"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(model: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(model, **fields)


def test_what_a_request_cannot_ask_is_refused(model: Path, llm: Callable[..., LLM]) -> None:
    engine = llm(model, draft_depth=1)
    with pytest.raises(InvalidRequestError, match="depth is 1; this model is served with tokens passing 3 layers"):
        engine.generate(PROMPTS[0], SamplingParams(depth=1))
    with pytest.raises(InvalidRequestError, match=r"exit_threshold is 0\.5; this model is served whole"):
        engine.generate(PROMPTS[0], SamplingParams(exit_threshold=0.5))


def silence(model: Path, layers: tuple[int, ...]) -> None:
    """Make layers add nothing to what passes them."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    for name in tensors:
        if any(f"layers.{layer}." in name for layer in layers) and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
