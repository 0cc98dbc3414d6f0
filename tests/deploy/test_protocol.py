import json

import pytest

from deploy.openai.body import decode_json
from deploy.openai.fields import shown
from deploy.openai.protocol import ChatRequest, CompletionRequest, parse
from engine.errors import InvalidRequestError
from engine.request import SamplingParams

USER = [{"role": "user", "content": "hi"}]


def completion(**fields):
    return parse(CompletionRequest, {"prompt": "hi", **fields})


def chat(**fields):
    return parse(ChatRequest, {"messages": USER, **fields})


def refusal(make, **fields):
    with pytest.raises(InvalidRequestError) as caught:
        make(**fields)
    return caught.value


def test_what_is_left_out_or_null_keeps_the_engines_defaults():
    assert chat(temperature=None, stop=None, top_k=None).sampling_params() == SamplingParams()


def test_completions_default_to_sixteen_tokens_and_chat_to_the_context():
    assert completion().sampling_params().max_tokens == 16
    assert chat().sampling_params().max_tokens is None


def test_every_sampling_field_reaches_the_engine():
    given = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 7,
        "max_tokens": 5,
        "min_tokens": 2,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    params = completion(**given, stop="a", stop_token_ids=[1], logit_bias={"5": -100}, logprobs=2).sampling_params()
    expected = SamplingParams(**given, stop=("a",), stop_token_ids=(1,), logit_bias={5: -100.0}, logprobs=2)
    assert params == expected


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ("hi",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts_come_in_four_forms(prompt, prompts):
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize("prompt", [[], 5, {"a": 1}, ["a", 1], [True], [-1], [[1], "a"], [1.5], None])
def test_any_other_prompt_is_refused_by_name(prompt):
    error = refusal(completion, prompt=prompt)
    assert error.param == "prompt"
    assert "list of token ids" in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "0.5"),
        ("temperature", True),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("seed", "1"),
        ("stream", "yes"),
        ("stream", 1),
        ("stop", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": True}),
        ("logit_bias", [1]),
        ("stop_token_ids", ["a"]),
        ("model", 5),
        ("stream_options", 5),
        ("logprobs", True),
    ],
)
def test_a_wrong_type_names_the_field_and_the_value(field, value):
    error = refusal(completion, **{field: value})
    assert error.param == field
    assert field in str(error)
    assert shown(value) in str(error)


def test_a_missing_field_is_named():
    with pytest.raises(InvalidRequestError, match="'prompt' is missing") as caught:
        parse(CompletionRequest, {})
    assert caught.value.param == "prompt"


def test_a_body_that_is_no_object_is_refused():
    with pytest.raises(InvalidRequestError, match="must be a JSON object"):
        parse(CompletionRequest, [1])


def test_an_unknown_field_is_named_with_close_matches():
    error = refusal(completion, temprature=0.5)
    assert error.param == "temprature"
    assert "did you mean temperature" in str(error)


def test_an_unknown_field_like_nothing_lists_what_there_is():
    assert "max_tokens" in str(refusal(completion, zzz=1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", 0),
        ("n", True),
        ("best_of", 3),
        ("echo", True),
        ("suffix", "x"),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("reasoning_effort", "high"),
        ("web_search_options", {}),
    ],
)
def test_what_would_change_the_result_and_is_not_served_is_refused_by_name(field, value):
    error = refusal(chat, **{field: value})
    assert error.param == field
    assert "not served" in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1),
        ("best_of", None),
        ("echo", False),
        ("tools", []),
        ("tool_choice", "auto"),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("user", "u"),
        ("store", True),
        ("metadata", {"a": "b"}),
        ("service_tier", "auto"),
        ("parallel_tool_calls", True),
    ],
)
def test_what_changes_nothing_is_accepted(field, value):
    assert chat(**{field: value}).sampling_params() == SamplingParams()


def test_usage_is_asked_for_in_the_stream_options():
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True).include_usage


def test_stream_options_need_a_stream():
    assert refusal(chat, stream_options={"include_usage": True}).param == "stream_options"


def test_chat_logprobs_become_the_engines_count():
    assert chat(logprobs=True).sampling_params().logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).sampling_params().logprobs == 3
    assert chat(logprobs=False).sampling_params().logprobs is None


def test_top_logprobs_need_logprobs():
    assert refusal(chat, top_logprobs=3).param == "top_logprobs"
    assert refusal(chat, logprobs=True, top_logprobs=21).param == "top_logprobs"


def test_max_completion_tokens_means_max_tokens():
    assert chat(max_completion_tokens=5).sampling_params().max_tokens == 5
    assert refusal(chat, max_completion_tokens=5, max_tokens=6).param == "max_tokens"


def test_a_message_of_text_parts_is_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": parts}, {"role": "user", "content": "c", "name": "Ann"}])
    assert request.messages == (
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "c", "name": "Ann"},
    )


def test_an_answer_can_be_sent_back_as_the_client_got_it():
    echoed = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}
    assert chat(messages=[*USER, echoed, *USER]).messages[1] == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([*USER, {"role": "assistant", "content": "x", "tool_calls": [1]}], "messages[1].tool_calls"),
    ],
)
def test_a_wrong_message_is_named(messages, param):
    assert refusal(chat, messages=messages).param == param


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"a": ', "at column"),
        (b'{\n"a": ', "line 2, column"),
        (b"", "not valid JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b"\xff", "UTF-8"),
        (b"[" * 100_000, "cannot be read"),
        (b"1" * 5000, "cannot be read"),
    ],
)
def test_a_body_that_is_no_json_is_refused(raw, said):
    with pytest.raises(InvalidRequestError, match=said):
        decode_json(raw)


def test_a_whole_surrogate_pair_is_a_character():
    assert decode_json(json.dumps({"a": "😀"}).encode()) == {"a": "😀"}
