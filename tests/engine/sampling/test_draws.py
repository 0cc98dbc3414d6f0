"""Draws: right distribution, and a function of the row, its seed and its position only."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sampling import Sampler, SamplingRow

from .oracle import draws, oracle_probabilities

V = 1000  # not a whole number of blocks
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=0.9, min_p=0.05),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.99),
    SamplingParams(temperature=1.4, top_p=0.9, top_k=300, min_p=0.01),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(temperature=0.7, logit_bias={3: 5.0, 999: 4.0}, logprobs=3),
]


@pytest.mark.parametrize("params", KINDS[1:7], ids=str)
def test_draws_follow_the_filtered_distribution(params):
    logits = torch.randn(V, generator=torch.Generator().manual_seed(3)) * 2
    n = 20_000
    counts = torch.bincount(draws(logits, replace(params, seed=11), n), minlength=V).double()
    expected = oracle_probabilities(logits, params).double() * n
    assert counts[expected == 0].sum() == 0
    rare = expected < 5  # pooled: chi-square needs at least about five expected in a bin
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    chi = float(((counts - expected) ** 2 / expected.clamp(min=1e-9)).sum())
    freedom = len(counts) - 1
    assert chi < freedom + 4 * (2 * freedom) ** 0.5


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 30)), min_size=1, max_size=40), st.randoms())
def test_a_token_depends_on_its_own_row_only(picked, random):
    logits = (torch.randn(len(picked), V, generator=torch.Generator().manual_seed(len(picked))) * 4).bfloat16()
    rows = [
        SamplingRow(replace(params, seed=i), position, [1, 2, 3], [4, 4, 5], [7] if i % 3 == 0 else [])
        for i, (params, position) in enumerate(picked)
    ]
    sampler = Sampler(V, "cpu")
    alone = [sampler.sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    order = list(range(len(rows)))
    random.shuffle(order)
    together = sampler.sample(logits[order], [rows[i] for i in order])
    assert together == [alone[i] for i in order]


def test_position_and_seed_change_the_draw():
    logits = torch.zeros(V)
    a, b = draws(logits, SamplingParams(seed=1), 50), draws(logits, SamplingParams(seed=2), 50)
    assert len(set(a.tolist())) > 40
    assert not torch.equal(a, b)
    assert torch.equal(a, draws(logits, SamplingParams(seed=1), 50))


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-3])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_a_temperature_near_zero_draws_the_likeliest(temperature, top_p):
    logits = torch.randn(V, generator=torch.Generator().manual_seed(0)) * 5
    found = draws(logits, SamplingParams(temperature=temperature, top_p=top_p, seed=0), 20)
    assert set(found.tolist()) == {int(logits.argmax())}


def test_greedy_takes_the_lowest_id_of_equals():
    logits = torch.zeros(V)
    logits[[700, 300, 950]] = 2.0
    assert set(draws(logits, SamplingParams(temperature=0.0), 2).tolist()) == {300}
