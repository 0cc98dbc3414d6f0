"""The default model against transformers, in float32: the same logits and the same 64 greedy tokens."""

from pathlib import Path

import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from benchmarks.prompts import prompts
from engine.llm import LLM
from engine.request import Request, SamplingParams
from tests.engine.sweeps import Bench

pytestmark = pytest.mark.model
TOLERANCE = 1e-3
N_TOKENS = 64


@pytest.fixture(scope="module")
def oracle(smollm2_dir: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()


@pytest.mark.timeout(900)
def test_logits_and_greedy_tokens_equal_transformers_on_20_prompts(smollm2_dir: Path, oracle: torch.nn.Module) -> None:
    llm = LLM(str(smollm2_dir), dtype="float32", context=2048, prefill_rows=200)
    tokenizer = llm.engine.tokenizer
    inputs = [tokenizer.apply_chat_template([{"role": "user", "content": text}])[:400] for text in prompts(20)]
    params = SamplingParams(temperature=0, max_tokens=N_TOKENS, ignore_eos=True)
    completions = llm.generate(inputs, params)  # all 20 in one batch, prompts in chunks
    bench = Bench(smollm2_dir, context=2048)
    for ids, completion in zip(inputs, completions, strict=True):
        got = [token.id for token in completion.tokens]
        with torch.inference_mode():
            expected = oracle(torch.tensor([ids + got])).logits[0]
        assert float((bench.logits(ids + got) - expected).abs().max()) < TOLERANCE
        # Teacher-forced by the engine's own tokens, so one near-tie does not hide what follows it.
        for token, logits in zip(got, expected[len(ids) - 1 : -1], strict=True):
            best = logits.topk(2)
            assert token == int(best.indices[0]) or float(best.values[0] - logits[token]) < TOLERANCE


def test_bfloat16_stays_close_to_float32(smollm2_dir: Path) -> None:
    ids = LLM(str(smollm2_dir), context=2048).engine.tokenizer.encode(prompts(1)[0])[:200]
    exact, rounded = (
        Bench(smollm2_dir, context=2048).logits(ids),
        Bench(smollm2_dir, "bfloat16", context=2048).logits(ids),
    )
    assert float((exact - rounded).abs().mean()) < 0.25
    agreement = float((exact.argmax(-1) == rounded.argmax(-1)).float().mean())
    assert agreement > 0.9


def test_a_request_of_text_is_answered_in_text(smollm2_dir: Path) -> None:
    llm = LLM(str(smollm2_dir), dtype="float32", context=1024)
    completion = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}], SamplingParams(temperature=0, max_tokens=32)
    )
    assert "Paris" in completion.text
    assert completion.finish_reason == "stop"
    stream = "".join(
        delta.text for delta in llm.stream(completion.prompt_ids, SamplingParams(temperature=0, max_tokens=32))
    )
    assert stream == completion.text


def test_no_two_requests_share_a_fate(smollm2_dir: Path) -> None:
    """Cancelling one sequence in mid-stream leaves the other's tokens as they were."""
    llm = LLM(str(smollm2_dir), dtype="float32", context=1024)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    ids = tuple(llm.engine.tokenizer.encode("The three primary colours are"))
    alone = [token.id for token in llm.generate([ids], params)[0].tokens]
    got: list[int] = []
    engine = llm.engine
    engine.add(engine.prepare(Request("kept", ids, params), lambda delta: got.extend(t.id for t in delta.tokens)))
    engine.add(engine.prepare(Request("gone", ids[:3], params), lambda _: None))
    for _ in range(5):
        engine.step()
    engine.cancel("gone")
    while engine.has_work:
        engine.step()
    assert got == alone
