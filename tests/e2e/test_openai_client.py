"""The official client against a running server."""

import httpx
import openai
import pytest

from engine.checkpoint.store import DEFAULT_MODEL

pytestmark = [pytest.mark.cluster, pytest.mark.model]

FRANCE = "The capital of France is"
ASK = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def client(server):
    with server.client as client:
        yield client


def complete(client, prompt=FRANCE, **options):
    return client.completions.create(model=DEFAULT_MODEL, prompt=prompt, **{"temperature": 0, **options})


def ask(client, **options):
    return client.chat.completions.create(model=DEFAULT_MODEL, messages=ASK, **{"temperature": 0, **options})


def test_the_models_are_listed(client):
    assert [model.id for model in client.models.list()] == [DEFAULT_MODEL, "auto"]
    assert client.models.retrieve("auto").id == "auto"


def test_a_chat_is_answered(client):
    answer = ask(client, max_completion_tokens=12)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model == DEFAULT_MODEL
    assert answer.system_fingerprint.startswith("fp_")


def test_auto_answers_with_the_name_of_the_model_chosen(client):
    answer = client.completions.create(model="auto", prompt=FRANCE, max_tokens=1)
    assert answer.model == DEFAULT_MODEL


def test_a_completion_has_sixteen_tokens_unless_told_otherwise(client):
    done = complete(client)
    assert done.choices[0].text.startswith(" Paris")
    assert (done.usage.completion_tokens, done.choices[0].finish_reason) == (16, "length")


def test_a_stream_says_the_same_as_the_whole(client):
    chunks = list(ask(client, max_tokens=12, stream=True, stream_options={"include_usage": True}))
    whole = ask(client, max_tokens=12)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_several_prompts_are_several_choices(client):
    both = complete(client, [FRANCE, "2, 4, 6,"], max_tokens=4)
    alone = [complete(client, prompt, max_tokens=4) for prompt in (FRANCE, "2, 4, 6,")]
    assert [c.index for c in both.choices] == [0, 1]
    assert [c.text for c in both.choices] == [one.choices[0].text for one in alone]
    assert both.usage.total_tokens == sum(one.usage.total_tokens for one in alone)


def test_several_prompts_share_a_stream(client):
    texts = ["", ""]
    for chunk in complete(client, [FRANCE, "2, 4, 6,"], max_tokens=4, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [complete(client, prompt, max_tokens=4).choices[0].text for prompt in (FRANCE, "2, 4, 6,")]


def test_token_ids_are_a_prompt(client):
    assert complete(client, [504, 3575, 282], max_tokens=2).usage.prompt_tokens == 3


def test_a_stop_string_ends_the_text_before_it(client):
    done = complete(client, "1, 2, 3, 4,", stop=[" 7"], max_tokens=30)
    assert done.choices[0].finish_reason == "stop"
    assert "6" in done.choices[0].text
    assert "7" not in done.choices[0].text


def test_a_completions_logprobs_line_up_with_its_text(client):
    choice = complete(client, logprobs=2, max_tokens=5).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    for token, logprob, top, offset in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset, strict=True
    ):
        assert choice.text[offset:].startswith(token)
        assert top[token] == logprob == max(top.values())  # greedy: the chosen one is the likeliest
        assert len(top) == 2


def test_a_chats_logprobs_line_up_with_its_text(client):
    choice = ask(client, logprobs=True, top_logprobs=3, max_tokens=5).choices[0]
    assert b"".join(bytes(t.bytes) for t in choice.logprobs.content).decode() == choice.message.content
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0


def test_the_same_seed_draws_the_same(client):
    drawn = [complete(client, temperature=1.0, seed=seed, max_tokens=20).choices[0].text for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_an_unknown_model_is_404_with_the_names_there_are(client):
    with pytest.raises(openai.NotFoundError, match=f"{DEFAULT_MODEL}, auto") as caught:
        client.completions.create(model="gpt-9", prompt="hi")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"n": 2}, "n"),
        ({"extra_body": {"top_kk": 1}}, "top_kk"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_value_is_400_naming_the_field(client, fields, param, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, stream=stream, **fields)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_a_prompt_over_the_context_is_400_with_both_numbers(client):
    with pytest.raises(openai.BadRequestError, match=r"9000 tokens.*8192") as caught:
        complete(client, [5] * 9000)
    assert caught.value.param == "prompt"


def test_a_body_over_the_limit_is_413(server):
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x" * 200_000})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


def test_it_is_healthy(server):
    health = httpx.get(f"{server.url}/health", timeout=30)
    assert (health.status_code, health.json()["ok"]) == (200, True)
