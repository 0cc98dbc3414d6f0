"""Requests through the engine: the right tokens whatever runs beside them, and every way to end."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, InvalidRequestError, OutOfMemoryError
from engine.llm import LLM
from engine.passes.plain import PlainPass
from engine.request import Completion, Delta, Request, SamplingParams, Token
from engine.sampling import SamplingRow
from tests.engine.test_parity import random_tokens

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[[str], Path]) -> LLM:
    return LLM(str(tiny_model("llama")), dtype="float32", max_sequences=16)


def ids(completion: Completion) -> list[int]:
    return [token.id for token in completion.tokens]


@pytest.mark.parametrize("name", ["llama", "opt", "mistral-window", "qwen2-window", "qwen3", "llama3-rope"])
def test_greedy_tokens_equal_transformers(tiny_model: Callable[[str], Path], name: str) -> None:
    prompts = [random_tokens(length, seed=length) for length in (3, 40, 70)]
    reference = AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32).eval()
    completions = LLM(str(tiny_model(name)), dtype="float32").generate(prompts, replace(GREEDY, max_tokens=64))
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=64, min_new_tokens=64, do_sample=False, pad_token_id=0
        )[0, len(prompt) :]
        # min_new_tokens bans the end of sequence, ignore_eos does not: compare up to where it was chosen
        got = ids(completion)
        end = got.index(2) if 2 in got else 64
        assert got[:end] == expected[:end].tolist()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_batched_equals_alone(llm: LLM, params: SamplingParams) -> None:
    prompts = [random_tokens(length, seed=length) for length in (1, 5, 63, 64, 65, 100, 200)]
    together = llm.generate(prompts, params)
    assert [ids(c) for c in together] == [ids(llm.generate([prompt], params)[0]) for prompt in prompts]


@pytest.mark.parametrize("prefill_rows", [1, 17, 64])
def test_chunked_prefill_gives_the_same_tokens(llm: LLM, tiny_model: Callable[[str], Path], prefill_rows: int) -> None:
    prompts = [random_tokens(length, seed=length) for length in (5, 64, 130)]
    chunked = LLM(str(tiny_model("llama")), dtype="float32", prefill_rows=prefill_rows)
    assert [ids(c) for c in chunked.generate(prompts, GREEDY)] == [ids(c) for c in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_preempted_sequences_generate_the_same_tokens(
    llm: LLM, tiny_model: Callable[[str], Path], params: SamplingParams
) -> None:
    prompts = [random_tokens(60, seed=seed) for seed in range(6)]
    params = replace(params, max_tokens=100)
    tight = LLM(str(tiny_model("llama")), dtype="float32", kv_tokens=512, max_sequences=6)
    assert [ids(c) for c in tight.generate(prompts, params)] == [ids(c) for c in llm.generate(prompts, params)]
    stats = tight.engine.stats()
    assert stats.preemptions > 0
    assert stats.kv_blocks_used == 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, replace(SAMPLED, frequency_penalty=1.0, repetition_penalty=1.2)])
@pytest.mark.parametrize("done", [1, 10, 23])
def test_a_resumed_request_goes_on_with_the_same_tokens_and_text(llm: LLM, params: SamplingParams, done: int) -> None:
    prompt = random_tokens(20, seed=3)
    deltas: list[Delta] = []
    run(llm.engine, Request("whole", tuple(prompt), params), deltas)
    tokens = [t.id for d in deltas for t in d.tokens]
    resumed: list[Delta] = []
    run(llm.engine, Request("rest", tuple(prompt), params, generated=tuple(tokens[:done])), resumed)
    assert [t.id for d in resumed for t in d.tokens] == tokens[done:]
    assert "".join(d.text for d in resumed) == "".join(d.text for d in deltas[done:])
    counts = [(each[-1].usage.prompt_tokens, each[-1].usage.completion_tokens) for each in (resumed, deltas)]
    assert counts[0] == counts[1]


def run(engine: Engine, request: Request, deltas: list[Delta]) -> None:
    engine.add(engine.prepare(request, deltas.append))
    while engine.has_work:
        engine.step()


def test_max_tokens_ends_with_length(llm: LLM) -> None:
    completion = llm.generate([[5, 6]], replace(GREEDY, max_tokens=3))[0]
    assert (len(completion.tokens), completion.finish_reason) == (3, "length")
    assert completion.usage.completion_tokens == 3


def test_without_max_tokens_generation_ends_at_the_context(tiny_model: Callable[[str], Path]) -> None:
    llm = LLM(str(tiny_model("llama")), dtype="float32", context=32)
    completion = llm.generate([[5] * 20], SamplingParams(temperature=0, ignore_eos=True))[0]
    assert (len(completion.tokens), completion.finish_reason) == (12, "length")


def test_a_stop_token_ends_the_request_and_is_named(llm: LLM) -> None:
    tokens = ids(llm.generate([[5, 6, 7]], GREEDY)[0])
    stop = tokens[4]
    completion = llm.generate([[5, 6, 7]], replace(GREEDY, stop_token_ids=(stop,)))[0]
    assert ids(completion) == tokens[: tokens.index(stop) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_a_stop_string_is_cut_off_unless_it_is_to_be_included(llm: LLM) -> None:
    text = llm.generate([[5, 6, 7]], GREEDY)[0].text
    stop = text[4:7]
    cut = llm.generate([[5, 6, 7]], replace(GREEDY, stop=(stop,)))[0]
    assert cut.text == text[: text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    kept = llm.generate([[5, 6, 7]], replace(GREEDY, stop=(stop,), include_stop_str_in_output=True))[0]
    assert kept.text == text[: text.index(stop) + len(stop)]


def test_min_tokens_keeps_stop_tokens_from_being_chosen(llm: LLM) -> None:
    stop = ids(llm.generate([[5, 6, 7]], GREEDY)[0])[0]
    completion = llm.generate([[5, 6, 7]], replace(GREEDY, stop_token_ids=(stop,), min_tokens=10))[0]
    assert stop not in ids(completion)[:10]
    assert len(completion.tokens) >= 10


def test_the_end_of_sequence_ends_the_request(llm: LLM) -> None:
    bias = {2: 100.0}
    completion = llm.generate([[5, 6]], SamplingParams(temperature=0, logit_bias=bias))[0]
    assert (ids(completion), completion.finish_reason, completion.text) == ([2], "stop", "")


def test_logprobs_come_from_the_raw_logits(llm: LLM) -> None:
    completion = llm.generate([[5, 6, 7]], replace(GREEDY, logprobs=3, max_tokens=4))[0]
    for token in completion.tokens:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0] == (token.id, pytest.approx(token.logprob))
        assert token.confidence == pytest.approx(2.718281828**token.logprob, rel=1e-4)


def test_cancelling_frees_the_blocks_and_says_so(llm: LLM) -> None:
    deltas: list[Delta] = []
    llm.engine.add(llm.engine.prepare(Request("gone", (5, 6, 7), GREEDY), deltas.append))
    llm.engine.step()
    assert llm.engine.stats().kv_blocks_used == 1
    llm.engine.cancel("gone")
    assert llm.engine.stats().kv_blocks_used == 0
    assert deltas[-1].finish_reason == "cancelled"
    assert not llm.engine.step()


def test_closing_a_stream_cancels_its_request(llm: LLM) -> None:
    stream = llm.stream([5, 6, 7], GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], GREEDY, "empty"),
        ([5] * 512, GREEDY, "512"),
        ([5, 100000], GREEDY, "320"),
        ([-1], GREEDY, "token id"),
        ([5], replace(GREEDY, temperature=-1), "temperature"),
        ([5], replace(GREEDY, max_tokens=512), "511"),
        ([5], replace(GREEDY, logit_bias={400: 1.0}), "400"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    llm: LLM, prompt: list[int], params: SamplingParams, words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        llm.engine.prepare(Request("bad", tuple(prompt), params), lambda _: None)


def test_a_request_id_in_use_is_refused(llm: LLM) -> None:
    sequence = llm.engine.prepare(Request("twice", (5,), GREEDY), lambda _: None)
    llm.engine.add(sequence)
    with pytest.raises(InvalidRequestError, match="twice"):
        llm.engine.add(llm.engine.prepare(Request("twice", (5,), GREEDY), lambda _: None))
    llm.engine.cancel("twice")


def test_too_little_memory_names_every_term(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(OutOfMemoryError, match=r"KiB.*weights.*workspaces.*KV cache of 512 positions.*Raise the limit"):
        Engine.load(EngineConfig(str(tiny_model("llama")), dtype="float32", memory_bytes=200_000))


def test_memory_stays_within_its_limit(tiny_model: Callable[[str], Path]) -> None:
    engine = Engine.load(EngineConfig(str(tiny_model("llama")), dtype="float32", memory_bytes=16_000_000))
    assert engine.tiers["device"].used_bytes <= 16_000_000
    assert engine.stats().kv_blocks_total >= 8


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("context", 100000, "at most 512"), ("dtype", "int3", "bfloat16"), ("device", "tpu", "cuda")],
)
def test_a_bad_configuration_is_refused(
    tiny_model: Callable[[str], Path], field: str, value: int | str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine.load(replace(EngineConfig(str(tiny_model("llama"))), **{field: value}))


def test_logits_that_are_not_finite_end_their_request_and_no_other(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = cast(PlainPass, llm.engine._pass)._sampler
    sample = sampler.sample

    def damaged(logits: torch.Tensor, rows: list[SamplingRow]) -> list[Token]:
        logits = logits.clone()
        for i, row in enumerate(rows):
            if len(row.prompt_ids) == 3 and row.position == 5:
                logits[i, 7] = torch.nan
        return sample(logits, rows)

    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]
    expected = [ids(completion) for completion in llm.generate(prompts, GREEDY)]
    monkeypatch.setattr(sampler, "sample", damaged)
    completions = llm.generate(prompts, GREEDY)
    assert [completion.finish_reason for completion in completions] == ["length", "error", "length"]
    assert "not finite" in str(completions[1].error)
    assert [ids(c) for c in completions] == [expected[0], expected[1][:2], expected[2]]
