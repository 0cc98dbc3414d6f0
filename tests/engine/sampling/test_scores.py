"""Confidence and log-probabilities: always of the raw logits at temperature 1."""

import pytest
import torch

from engine.errors import HeliosError
from engine.request import SamplingParams
from engine.sampling import Sampler, SamplingRow

V = 700
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.3, seed=1),
    SamplingParams(temperature=2.0, top_p=0.9, seed=1),
    SamplingParams(temperature=0.0, logit_bias={5: 100.0}, frequency_penalty=1.0),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logprob_and_confidence_come_from_the_raw_logits(params, dtype):
    logits = (torch.randn(3, V, generator=torch.Generator().manual_seed(1)) * 5).to(dtype)
    expected = logits.double().log_softmax(-1)
    rows = [SamplingRow(params, position, [1, 2], [3, 3]) for position in range(3)]
    for row, token in enumerate(Sampler(V, "cpu").sample(logits, rows)):
        assert token.logprob == pytest.approx(float(expected[row, token.id]), abs=1e-5)
        assert token.confidence == pytest.approx(float(expected[row].max().exp()), rel=1e-5)
        assert token.top_logprobs == ()


def test_top_logprobs_are_the_likeliest_best_first_for_rows_that_ask():
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(2)) * 5
    rows = [SamplingRow(SamplingParams(temperature=0.0, logprobs=count), 0) for count in (None, 2, 20)]
    found = Sampler(V, "cpu").sample(logits, rows)
    for row, count in ((1, 2), (2, 20)):
        values, ids = logits[row].double().log_softmax(-1).topk(count)
        assert [pair[0] for pair in found[row].top_logprobs] == ids.tolist()
        assert [pair[1] for pair in found[row].top_logprobs] == pytest.approx(values.tolist(), abs=1e-5)
    assert found[0].top_logprobs == ()


def test_logprobs_of_zero_lists_no_alternatives():
    rows = [SamplingRow(SamplingParams(temperature=0.0, logprobs=0), 0)]
    assert Sampler(V, "cpu").sample(torch.zeros(1, V), rows)[0].top_logprobs == ()


def test_the_greedy_token_leads_the_list_among_equals():
    logits = torch.zeros(1, V)
    [token] = Sampler(V, "cpu").sample(logits, [SamplingRow(SamplingParams(temperature=0.0, logprobs=1), 0)])
    # More equals than the list looks at: any may be named, with the right value.
    assert token.id == 0
    assert token.top_logprobs[0][1] == pytest.approx(token.logprob)
    logits[0, [9, 650]] = 1.0
    [token] = Sampler(V, "cpu").sample(logits, [SamplingRow(SamplingParams(temperature=0.0, logprobs=1), 0)])
    assert token.top_logprobs[0][0] == token.id == 9


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused_by_row(bad, params):
    logits = torch.zeros(40, V)
    logits[35, 3] = bad
    rows = [SamplingRow(params, 0)] * 40
    with pytest.raises(HeliosError, match="row 35 are not finite"):
        Sampler(V, "cpu").sample(logits, rows)


def test_a_sampled_row_without_a_seed_is_refused():
    with pytest.raises(ValueError, match="seed"):
        Sampler(V, "cpu").sample(torch.zeros(1, V), [SamplingRow(SamplingParams(), 0)])


def test_logits_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\(1, 700\)"):
        Sampler(V, "cpu").sample(torch.zeros(1, V - 1), [SamplingRow(SamplingParams(), 0)])


def test_no_rows_give_no_tokens():
    assert Sampler(V, "cpu").sample(torch.zeros(0, V), []) == []
