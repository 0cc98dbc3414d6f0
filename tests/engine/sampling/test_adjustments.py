"""Bias, penalties and bans, seen through greedy choices and directly."""

import pytest
import torch

from engine.request import SamplingParams
from engine.sampling import Sampler, SamplingRow, penalties

from .oracle import oracle_repetition

V = 300


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 3


def adjusted(raw: torch.Tensor, params: SamplingParams, prompt=(), output=(), banned=()) -> torch.Tensor:
    result = raw.clone()
    penalties.apply(result, params, prompt, output, banned)
    return result


@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    prompt, output = [1, 2, 2, 50], [2, 7, 7, 299]
    found = adjusted(logits(), SamplingParams(repetition_penalty=penalty), prompt, output)
    torch.testing.assert_close(found, oracle_repetition(logits(), penalty, prompt + output))


def test_presence_and_frequency_count_the_output_only():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    expected = logits()
    expected[7] -= 0.5 + 3 * 0.25
    expected[9] -= 0.5 + 0.25
    torch.testing.assert_close(adjusted(logits(), params, prompt=[1, 7], output=[7, 9, 7, 7]), expected)


def test_bias_comes_before_penalties_and_bans_come_last():
    params = SamplingParams(logit_bias={4: 100.0, 5: 100.0}, repetition_penalty=2.0)
    expected = logits()
    expected[4], expected[5] = (expected[4] + 100) / 2, float("-inf")
    torch.testing.assert_close(adjusted(logits(), params, prompt=[4, 5], banned=[5]), expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 1])
def test_a_banned_token_is_not_chosen(temperature, top_k):
    raw = logits()
    raw[17], raw[18] = 60.0, 40.0
    params = SamplingParams(temperature=temperature, top_k=top_k, seed=1)
    sampler = Sampler(V, "cpu")
    [free] = sampler.sample(raw[None], [SamplingRow(params, 0)])
    [barred] = sampler.sample(raw[None], [SamplingRow(params, 0, banned_ids=[17])])
    assert (free.id, barred.id) == (17, 18)


def test_the_given_logits_are_left_as_they_were():
    raw = logits()[None]
    before = raw.clone()
    row = SamplingRow(SamplingParams(seed=1, temperature=0.5, logit_bias={1: 1.0}), 0, banned_ids=[2])
    Sampler(V, "cpu").sample(raw, [row])
    assert torch.equal(raw, before)


def test_bias_changes_one_row_of_a_batch_and_no_other():
    raw = logits().expand(2, -1)
    rows = [SamplingRow(SamplingParams(temperature=0.0, logit_bias=bias), 0) for bias in ({}, {123: 100.0})]
    found = Sampler(V, "cpu").sample(raw, rows)
    assert [token.id for token in found] == [int(raw[0].argmax()), 123]
