"""Kept sets and probabilities against transformers' processors."""

import pytest
import torch

from engine.request import SamplingParams
from engine.sampling.draw import Filters, _kept
from engine.sampling.wide import BLOCK, candidates

from .oracle import draws, oracle_probabilities

V = 6 * BLOCK

FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=1),
    SamplingParams(top_k=20),
    SamplingParams(top_p=0.8),
    SamplingParams(top_p=0.001),
    SamplingParams(top_p=0.999),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=0.1, temperature=1.7),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=30, top_p=0.95, min_p=0.05),
    SamplingParams(temperature=1.5, top_p=0.9, min_p=0.02),
    SamplingParams(top_k=10 * V),
]


def distribution(logits: torch.Tensor, params: SamplingParams, width: int) -> tuple[torch.Tensor, bool]:
    """Filtered probabilities [V] from ``width`` candidates of ``logits`` [V], and whether they are surely complete."""
    column = lambda number: torch.tensor([[number]], dtype=torch.float64)  # noqa: E731
    mass = ((logits.double() - logits.max()) / params.temperature).exp().sum()
    filters = Filters(
        temperature=column(params.temperature),
        top_k=torch.tensor([[params.top_k]]),
        top_p=column(params.top_p),
        min_p=column(params.min_p),
        uniform=column(0.5),
        mass=column(float(mass)),
    )
    values, ids = candidates(logits[None], width)
    weights, complete = _kept(values, filters, whole=width == V)
    result = torch.zeros(V, dtype=torch.float64)
    result[ids[0]] = weights[0] / weights.sum()
    return result, bool(complete)


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_probabilities_are_those_of_transformers(params, seed):
    logits = torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 3
    expected = oracle_probabilities(logits, params)
    found, complete = distribution(logits, params, V)
    assert complete
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found.float(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("width", [8, 40, 200])
def test_a_short_list_said_to_be_complete_gives_the_same_probabilities(params, width):
    for seed in range(5):
        logits = torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 3
        logits = logits.bfloat16().float()  # with equals
        found, complete = distribution(logits, params, width)
        if complete:
            whole, _ = distribution(logits, params, V)
            torch.testing.assert_close(found, whole)


def test_top_k_keeps_all_tokens_equal_to_the_kth():
    logits = torch.zeros(V)
    logits[10], logits[20:40] = 3.0, 1.0
    params = SamplingParams(top_k=5)
    expected = oracle_probabilities(logits, params)
    assert int((expected > 0).sum()) == 21
    found, _ = distribution(logits, params, V)
    torch.testing.assert_close(found.float(), expected)
    assert set(draws(logits, SamplingParams(top_k=5, seed=1), 2000).tolist()) == {10, *range(20, 40)}


def test_top_p_takes_equals_in_order_of_their_ids():
    logits = torch.full((V,), -50.0)
    logits[[3, 200, 400, 500]] = 1.0
    assert set(draws(logits, SamplingParams(top_p=0.5, seed=1), 200).tolist()) == {3, 200}
