"""Top-K sparse attention over V, and the KV cache in 4 bits."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.attention import AttentionPlanner, Span
from engine.errors import ConfigError
from engine.llm import LLM
from engine.request import SamplingParams
from tests.engine.homes import SPEC, resident

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = [[5 + (7 * i) % 300 for i in range(n)] for n in (3, 40, 100)]


def tokens(llm: LLM) -> list[list[int]]:
    return [[token.id for token in completion.tokens] for completion in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "opt"])
def test_a_share_that_rounds_up_to_everything_is_exact(tiny_model: Callable[[str], Path], name: str) -> None:
    model = str(tiny_model(name))
    with LLM(model, dtype="float32") as dense, LLM(model, dtype="float32", value_share=0.999) as sparse:
        assert tokens(sparse) == tokens(dense)


@pytest.mark.parametrize("share", [0.1, 0.34, 0.8])
def test_the_k_largest_weights_and_the_newest_position_are_kept(share: float) -> None:
    torch.manual_seed(0)
    home, lengths = resident(40, scratch_blocks=40), [9, 30, 33]
    tables, spans, first = [], [], 0
    for row, length in enumerate(lengths):
        count = -(-length // 16)
        tables.append(list(range(first, first + count)))
        spans.append(Span(row, length - 1, 1, tables[-1]))
        first += count
    qkv = torch.randn(3, SPEC.q_size + 2 * SPEC.kv_size)
    with home.open(0, 0) as pool:
        pool.normal_()
        (group,) = AttentionPlanner(home.layout, home.device, share).plan(spans, [], None)
        out = group.attend(qkv, home.layout, pool).view(3, SPEC.n_kv_heads, -1, SPEC.head_dim)
        blocks = pool.view(-1, 2, SPEC.n_kv_heads, 16, SPEC.head_dim)
    query = qkv[:, : SPEC.q_size].view(3, SPEC.n_kv_heads, -1, SPEC.head_dim)
    for row, length in enumerate(lengths):
        keys, values = blocks[tables[row]].permute(1, 2, 0, 3, 4).reshape(2, SPEC.n_kv_heads, -1, SPEC.head_dim)
        for head in range(SPEC.n_kv_heads):
            weights = (query[row, head] @ keys[head, :length].T / math.sqrt(SPEC.head_dim)).softmax(-1)
            k = math.ceil(share * length)
            for q in range(len(weights)):
                others = weights[q, :-1].topk(k - 1).indices.tolist()
                kept = [*others, length - 1]
                expected = weights[q, kept] @ values[head, kept] / weights[q, kept].sum()
                torch.testing.assert_close(out[row, head, q], expected, rtol=1e-4, atol=1e-5)


def test_a_share_out_of_range_is_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"value_share is 0.*above 0 and at most 1"):
        LLM(str(tiny_model("llama")), value_share=0)


@pytest.mark.parametrize("home", ["device", "disk"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_kv_in_four_bits_does_not_depend_on_where_it_lives(
    tiny_model: Callable[[str], Path], tmp_path: Path, home: str, share: float
) -> None:
    model = str(tiny_model("llama"))
    places = {"device": {}, "disk": {"kv_tokens": 0, "kv_disk_tokens": 2048, "offload_dir": str(tmp_path)}}
    with LLM(model, dtype="float32", kv_dtype="int4", value_share=share) as reference:
        expected = tokens(reference)
        assert reference.engine.stats().memory["kv"] > 0
    with LLM(model, dtype="float32", kv_dtype="int4", value_share=share, **places[home]) as placed:
        assert tokens(placed) == expected


@pytest.mark.model
def test_kv_in_four_bits_stays_close_on_a_real_model(smollm2_dir: Path) -> None:
    prompt = "The three states of matter are solid,"
    params = SamplingParams(temperature=0, max_tokens=4)
    with LLM(str(smollm2_dir), context=256, max_sequences=1) as exact:
        wanted = exact.generate([prompt], params)[0].text
        whole = exact.engine.stats().memory["kv"]
    with LLM(str(smollm2_dir), context=256, max_sequences=1, kv_dtype="int4") as quantised:
        assert quantised.generate([prompt], params)[0].text == wanted
        assert quantised.engine.stats().memory["kv"] == whole * 36 // 128
