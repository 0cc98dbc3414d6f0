"""Per-token early exit: every token is what the first sure exit says of a text whose K and V are whole."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.index import Checkpoint
from engine.errors import ConfigError, InvalidRequestError
from engine.exits.heads import FILE
from engine.exits.save import save_heads
from engine.llm import LLM
from engine.request import Completion, SamplingParams
from engine.spec import Exit, ModelSpec
from tests.engine.serving import ALL_ON_DISK, AMPLE, ids
from tests.engine.test_parity import random_tokens

from .random_heads import WIDTH, Oracle, add_heads, random_tensors

EXITS = [Exit(1, "adapter", WIDTH, 0.12, 0.04), Exit(2, "norm", 0, 0.02, 0.002)]
"""With thresholds that some tokens of a random model reach and some do not."""
PROMPTS = [random_tokens(length, seed=length) for length in (1, 17, 40, 5)]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
FAMILIES = ("llama", "opt", "qwen2", "mistral-window")


@pytest.fixture(scope="module")
def with_heads(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Oracle]]:
    """A family's tiny model with heads at EXITS, and what it should say."""
    made: dict[str, tuple[Path, Oracle]] = {}

    def get(family: str) -> tuple[Path, Oracle]:
        if family not in made:
            model = shutil.copytree(tiny_model(family), tmp_path_factory.mktemp("exits") / family)
            made[family] = model, Oracle(model, EXITS, add_heads(model, EXITS))
        return made[family]

    return get


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(model: Path, **config: Any) -> LLM:
        fields = {"dtype": "float32", "threads": 1, "memory_bytes": AMPLE, "early_exit": True, "kv_tokens": 512}
        made.append(LLM(model, offload_dir=str(tmp_path / "offload"), **fields | config))
        return made[-1]

    yield make
    for each in made:
        stats = each.engine.stats()
        assert stats.kv_blocks_used == stats.running == stats.waiting == 0
        assert all(store.pool.free_blocks == store.pool.n_blocks for store in each.engine.kept.values())
        each.close()


def said(oracle: Oracle, prompt: list[int], threshold: float | None = None, count: int = 10) -> list[tuple[int, int]]:
    """Tokens and the layers that each passes, greedily, by a threshold or each exit's own."""
    tokens, found = list(prompt), []
    least = {at.layer: at.threshold if threshold is None else threshold for at in EXITS}
    for _ in range(count):
        for depth, logits in oracle.logits(tokens).items():
            if depth == oracle.n_layers or float(logits.softmax(-1).max()) >= least[depth]:
                found.append((int(logits.argmax()), depth))
                break
        tokens.append(found[-1][0])
    return found


def made(done: list[Completion]) -> list[list[tuple[int, int]]]:
    return [[(token.id, token.depth) for token in each.tokens] for each in done]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_leaves_where_it_is_first_sure(
    with_heads: Callable[[str], tuple[Path, Oracle]], llm: Callable[..., LLM], family: str
) -> None:
    model, oracle = with_heads(family)
    expected = [said(oracle, prompt) for prompt in PROMPTS]
    assert {depth for each in expected for _, depth in each} == {1, 2, 3}, "all ways out are taken"
    engine = llm(model)
    done = engine.generate(PROMPTS, GREEDY)
    assert made(done) == expected
    for each, tokens in zip(done, expected, strict=True):
        assert each.usage.depth == pytest.approx(sum(depth for _, depth in tokens) / len(tokens))


@settings(derandomize=True, deadline=None, max_examples=12)
@given(
    threshold=st.sampled_from([None, 0.0, 0.02, 0.1, 1.0]),
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    fields=st.fixed_dictionaries(
        {
            "max_sequences": st.integers(1, 6),
            "prefill_rows": st.sampled_from([5, 16, 512]),
            "tile_rows": st.sampled_from([4, 33]),
            "kv_tokens": st.sampled_from([64, 96, 512]),
        }
    ),
)
def test_batched_is_alone_whatever_the_batches(
    with_heads: Callable[[str], tuple[Path, Oracle]],
    threshold: float | None,
    lengths: list[int],
    fields: dict[str, int],
) -> None:
    model, oracle = with_heads("llama")
    prompts = [random_tokens(length, seed=length) for length in lengths]
    with LLM(model, dtype="float32", threads=1, early_exit=True, exit_threshold=threshold, **fields) as engine:
        done = engine.generate(prompts, GREEDY)
        assert made(done) == [said(oracle, prompt, threshold) for prompt in prompts]
        assert engine.engine.stats().kv_blocks_used == 0


def test_a_threshold_of_one_is_the_whole_model_and_of_nothing_the_first_exit(
    with_heads: Callable[[str], tuple[Path, Oracle]], llm: Callable[..., LLM]
) -> None:
    model, _ = with_heads("llama")
    whole = ids(llm(model, early_exit=False).generate(PROMPTS, GREEDY))
    first = ids(llm(model, early_exit=False, depth=1).generate(PROMPTS, GREEDY))
    assert ids(llm(model, exit_threshold=1.0).generate(PROMPTS, GREEDY)) == whole != first
    assert ids(llm(model, exit_threshold=0.0).generate(PROMPTS, GREEDY)) == first
    engine = llm(model)
    asked = [SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, exit_threshold=th) for th in (0.0, 1.0)]
    assert ids(engine.generate([PROMPTS[1]] * 2, asked)) == [first[1], whole[1]]


def test_requests_of_one_batch_have_depths_of_their_own(
    with_heads: Callable[[str], tuple[Path, Oracle]], llm: Callable[..., LLM]
) -> None:
    model, _ = with_heads("llama")
    cut = {d: ids(llm(model, early_exit=False, depth=d).generate(PROMPTS[1], GREEDY))[0] for d in (1, 2, 3)}
    engine = llm(model)
    params = [SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, depth=d) for d in (1, 2, 3)]
    done = engine.generate([PROMPTS[1]] * 3, params)
    assert ids(done) == [cut[1], cut[2], cut[3]]
    assert [each.usage.depth for each in done] == [1, 2, 3]
    for at, each in zip(EXITS, done, strict=False):
        assert each.usage.breaches == sum(token.confidence < at.threshold for token in each.tokens)
    assert done[1].usage.breaches > 0 == done[2].usage.breaches


def test_draws_do_not_depend_on_the_batch(
    with_heads: Callable[[str], tuple[Path, Oracle]], llm: Callable[..., LLM]
) -> None:
    model, _ = with_heads("qwen2")
    params = [SamplingParams(max_tokens=12, seed=i, ignore_eos=True, top_p=0.9) for i in range(len(PROMPTS))]
    together = llm(model).generate(PROMPTS, params)
    alone = [llm(model).generate(p, q)[0] for p, q in zip(PROMPTS, params, strict=True)]
    assert made(together) == made(alone)


@pytest.mark.parametrize(
    "place",
    [
        {"weights": ALL_ON_DISK},
        {"kv_tokens": 0, "kv_disk_tokens": 512},
        {"kv_tokens": 0, "kv_host_tokens": 512, "host_bytes": AMPLE},
    ],
    ids=["weights on disk", "KV on disk", "KV on the host"],
)
def test_wherever_weights_and_kv_lie(
    with_heads: Callable[[str], tuple[Path, Oracle]], llm: Callable[..., LLM], place: dict[str, Any]
) -> None:
    model, oracle = with_heads("llama")
    done = llm(model, **place).generate(PROMPTS, GREEDY)
    assert made(done) == [said(oracle, prompt) for prompt in PROMPTS]


def test_the_lead_over_the_second_best_as_confidence(
    with_heads: Callable[[str], tuple[Path, Oracle]], llm: Callable[..., LLM]
) -> None:
    model, oracle = with_heads("llama")
    engine = llm(model, confidence="margin")
    (done,) = engine.generate(PROMPTS[2], GREEDY)
    tokens = list(PROMPTS[2])
    for token in done.tokens:
        for depth, logits in oracle.logits(tokens).items():
            best = logits.softmax(-1).topk(2).values
            lead = float(best[0] - best[1])
            if depth == 3 or lead >= EXITS[depth - 1].margin_threshold:
                assert (token.id, token.depth) == (int(logits.argmax()), depth)
                assert token.confidence == pytest.approx(lead, abs=1e-5)
                break
        tokens.append(token.id)
    assert len({token.depth for token in done.tokens}) > 1


def test_a_check_over_frequent_tokens_decides_and_the_whole_head_speaks(
    with_heads: Callable[[str], tuple[Path, Oracle]], llm: Callable[..., LLM], tmp_path: Path
) -> None:
    plain, oracle = with_heads("llama")
    model = shutil.copytree(plain, tmp_path / "frequent")
    spec, frequent = ModelSpec.from_directory(model), list(range(0, 320, 5))
    save_heads(model / FILE, Checkpoint(model), spec, EXITS, random_tensors(spec, EXITS), frequent)
    threshold = 0.4
    (done,) = llm(model, exit_threshold=threshold, check_vocabulary=len(frequent)).generate(PROMPTS[1], GREEDY)
    tokens = list(PROMPTS[1])
    for token in done.tokens:
        for depth, logits in oracle.logits(tokens).items():
            if depth == 3 or float(logits[frequent].softmax(-1).max()) >= threshold:
                assert (token.id, token.depth) == (int(logits.argmax()), depth)
                assert token.confidence == pytest.approx(float(logits.softmax(-1).max()), abs=1e-5)
                break
        tokens.append(token.id)
    assert len({token.depth for token in done.tokens}) > 1


def test_memory_of_heads_and_kept_states_is_in_the_budget(
    with_heads: Callable[[str], tuple[Path, Oracle]], llm: Callable[..., LLM]
) -> None:
    model, _ = with_heads("llama")
    plain, exits = (llm(model, early_exit=early).engine.tiers["device"].by_use() for early in (False, True))
    assert exits["boundary"] == 2 * 512 * 64 * 4  # exits, positions, width, bytes
    heads = sum(t.numel() * 4 for t in random_tensors(ModelSpec.from_directory(model), EXITS).values())
    assert exits["weights"] - plain["weights"] == heads
    assert exits["kv"] == plain["kv"]


def test_a_request_for_what_is_not_served_is_refused(
    with_heads: Callable[[str], tuple[Path, Oracle]], llm: Callable[..., LLM]
) -> None:
    model, _ = with_heads("llama")
    early, whole, cut = llm(model), llm(model, early_exit=False), llm(model, early_exit=False, depth=1)
    for engine, params, words in [
        (early, SamplingParams(depth=4), "depth is 4; this model is served with tokens passing 1, 2, 3 layers"),
        (early, SamplingParams(depth=0), "depth is 0; it must be an integer"),
        (early, SamplingParams(exit_threshold=1.5), "exit_threshold is 1.5; it must be"),
        (whole, SamplingParams(depth=1), "passing 3 layers: leave it out, or have the model served with early_exit"),
        (whole, SamplingParams(exit_threshold=0.5), "exit_threshold is 0.5; this model is served whole"),
        (cut, SamplingParams(depth=3), "passing 1 layers"),
    ]:
        with pytest.raises(InvalidRequestError, match=words):
            engine.generate(PROMPTS[0], params)
    assert cut.generate(PROMPTS[0], SamplingParams(max_tokens=2, depth=1, exit_threshold=1.0))[0].usage.breaches == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"depth": 1}, "early_exit is set and depth is 1"),
        ({"score_exits": True}, "score_exits and early_exit are set"),
        ({"draft_depth": 1}, "early_exit and draft_depth are set"),
        ({"exit_threshold": 1.2}, "exit_threshold is 1.2; it must be a number from 0 to 1"),
        ({"confidence": "entropy"}, "confidence is 'entropy'; it must be one of top1, margin"),
        ({"check_vocabulary": 8}, "check_vocabulary is 8; these exits list 0 frequent tokens"),
        ({"early_exit": False, "check_vocabulary": 8}, "check_vocabulary is set, and early_exit"),
        ({"early_exit": False, "exit_threshold": 0.5}, "nothing that has a threshold"),
        ({"early_exit": 1}, "early_exit is 1; it must be true or false"),
        ({"value_share": 0.5}, "early_exit is set and value_share is 0.5"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(
    with_heads: Callable[[str], tuple[Path, Oracle]], llm: Callable[..., LLM], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        llm(with_heads("llama")[0], **fields)


def test_a_model_without_exits_is_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="early_exit is set and this model has no exits"):
        LLM(tiny_model("llama"), early_exit=True)
