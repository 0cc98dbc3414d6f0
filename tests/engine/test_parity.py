"""The engine against transformers: the same logits, however the positions are spread over sweeps."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests.engine.sweeps import Bench
from tests.engine.tiny import CONFIGS, VOCAB

TOLERANCE = 1e-4


def oracle(model: Path, tokens: list[int]) -> Tensor:
    """transformers' logits [len(tokens), V] in float32."""
    with torch.inference_mode():
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        logits: Tensor = reference(torch.tensor([tokens])).logits[0]
    return logits


def random_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(tiny_model: Callable[[str], Path], name: str) -> None:
    tokens = random_tokens(150)
    expected = oracle(tiny_model(name), tokens)
    assert expected.std() > 0.1  # a model that says something
    assert difference(Bench(tiny_model(name)).logits(tokens), expected) < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunk", [1, 37, 64])
def test_chunked_prefill_equals_transformers(tiny_model: Callable[[str], Path], name: str, chunk: int) -> None:
    tokens = random_tokens(100, seed=1)
    expected = oracle(tiny_model(name), tokens)
    assert difference(Bench(tiny_model(name)).logits(tokens, chunk), expected) < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_a_mixed_sweep_equals_each_sequence_alone(tiny_model: Callable[[str], Path], name: str) -> None:
    """Decode rows of very different lengths, first chunks and later chunks, all in one sweep."""
    bench = Bench(tiny_model(name))
    lengths, counts = [1, 2, 30, 64, 65, 130, 131, 300, 0, 70], [1, 1, 1, 1, 1, 1, 1, 1, 40, 25]
    sequences, expected = [], []
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tokens = random_tokens(length + count, seed=10 + i)
        expected.append(oracle(tiny_model(name), tokens)[length:])
        sequences.append(bench.sequence(tokens))
        if length:
            bench.sweep([(sequences[-1], length)])
    order = [3, 8, 0, 9, 7, 1, 2, 6, 4, 5]
    results = bench.sweep([(sequences[i], counts[i]) for i in order])
    for i, result in zip(order, results, strict=True):
        assert difference(result, expected[i]) < TOLERANCE, f"sequence of {lengths[i]} positions"
