from dataclasses import replace

import pytest

from engine.errors import InvalidRequestError
from engine.request import SamplingParams
from engine.sampling import validate

NAN, INF = float("nan"), float("inf")
REFUSED = [
    ("temperature", [-0.1, 100.1, NAN, INF, True, "1", None]),
    ("top_k", [-2, 1.0, True, None]),
    ("top_p", [0, 0.0, 1.01, -1, NAN, False]),
    ("min_p", [-0.01, 1.01, NAN]),
    ("presence_penalty", [-2.1, 2.1, NAN]),
    ("frequency_penalty", [-2.1, 2.1, "0"]),
    ("repetition_penalty", [0, -1.0, INF]),
    ("max_tokens", [0, -1, 1.5, True]),
    ("min_tokens", [-1, 0.0, None, 11]),
    ("logprobs", [-1, 21, True, 1.0]),
    ("seed", [2**63, -(2**63) - 1, 1.0, True]),
    ("stop", ["abc", ("",), (1,), tuple("abcdefghijklmnopq"), None]),
    ("stop_token_ids", [(100,), (-1,), (True,), (1.0,), 5, (1,) * 129]),
    ("logit_bias", [{100: 1.0}, {-1: 1.0}, {"1": 1.0}, {1: 101}, {1: NAN}, {1: True}, [1]]),
    ("ignore_eos", [1, None, "yes"]),
    ("include_stop_str_in_output", [0]),
    ("skip_special_tokens", ["true"]),
]
ACCEPTED = [
    SamplingParams(),
    SamplingParams(temperature=0, top_p=1, min_p=1, top_k=10**6, seed=-(2**63)),
    SamplingParams(temperature=100.0, presence_penalty=-2, frequency_penalty=2, repetition_penalty=1e-3),
    SamplingParams(max_tokens=3, min_tokens=3, logprobs=0, seed=2**63 - 1),
    SamplingParams(stop=tuple("abcdefghijklmnop"), stop_token_ids=(0, 99), logit_bias={0: -100, 99: 100.0}),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in REFUSED for value in values])
def test_a_wrong_value_is_refused_and_the_error_names_field_and_value(name, value):
    params = replace(SamplingParams(max_tokens=10), **{name: value})
    with pytest.raises(InvalidRequestError) as caught:
        validate(params, vocab_size=100)
    assert caught.value.param == name
    assert name in str(caught.value)


@pytest.mark.parametrize("params", ACCEPTED, ids=str)
def test_values_on_the_limits_are_accepted_unchanged(params):
    assert validate(params, vocab_size=100) is params


def test_a_top_k_of_minus_one_is_off():
    assert validate(SamplingParams(top_k=-1), vocab_size=100) == SamplingParams(top_k=0)


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(InvalidRequestError) as caught:
        validate(SamplingParams(stop=("x" * 10_000,) * 17), vocab_size=100)
    assert len(str(caught.value)) < 200
