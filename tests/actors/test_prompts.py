import pytest

from actors.prompts import encode, sampling_params
from engine.errors import InvalidRequestError
from engine.request import SamplingParams
from engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return Tokenizer.load(tiny)


def test_text_messages_and_ids_all_become_ids(tokenizer):
    text = tuple(tokenizer.encode("hello"))
    assert encode(tokenizer, "hello") == text
    assert encode(tokenizer, list(text)) == text
    assert encode(tokenizer, [{"role": "user", "content": "hello"}]) == tuple(
        tokenizer.encode("user: hello\nassistant: ", add_special_tokens=False)
    )


@pytest.mark.parametrize("prompt", [7, None, b"bytes", [1, "two"], [True], {"role": "user"}])
def test_what_is_no_prompt_is_refused(tokenizer, prompt):
    with pytest.raises(InvalidRequestError, match="give text, a list of messages or a list of token ids"):
        encode(tokenizer, prompt)


def test_parameters_come_as_an_object_or_a_mapping():
    assert sampling_params(None) == SamplingParams()
    assert sampling_params({"max_tokens": 3, "stop": "x"}) == SamplingParams(max_tokens=3, stop=("x",))
    assert sampling_params({"stop_token_ids": [1]}).stop_token_ids == (1,)
    given = SamplingParams(top_k=4)
    assert sampling_params(given) is given


def test_an_unknown_parameter_is_named_with_the_one_that_was_meant():
    with pytest.raises(InvalidRequestError, match="'max_token' is not a sampling parameter; did you mean max_tokens"):
        sampling_params({"max_token": 3})
