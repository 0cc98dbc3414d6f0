import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from deploy.openai.responses import MIN_LOGPROB, ChatShape, Choice, TextShape
from deploy.openai.sse import DONE, events
from engine.errors import OutOfMemoryError
from engine.request import Delta, Token, Usage

EURO = "€".encode()
WORDS = {1: b"Hel", 2: b"lo", 3: EURO[:2], 4: EURO[2:]}


class Words:
    def token_bytes(self, token_id):
        return WORDS[token_id]


def delta(text="", tokens=(), finish=None, usage=(3, 1), error=None):
    made = tuple(Token(i, -0.5, 0.6, ((i, -0.5), (1, float("-inf")))) for i in tokens)
    return Delta("r", made, text, Usage(*usage), finish, error=error)


async def replay(*deltas, failure=None):
    for item in deltas:
        yield item
    if failure:
        raise failure


async def read(shape, *deltas, choices=1, usage=False, failure=None):
    """The events decoded; the last is the end mark."""
    raw = [e async for e in events(shape, replay(*deltas, failure=failure), choices, usage)]
    assert raw.pop() == DONE
    assert all(e.startswith(b"data: ") and e.endswith(b"\n\n") and e.count(b"\n") == 2 for e in raw)
    return [json.loads(e[6:]) for e in raw]


async def test_a_chat_stream_begins_with_the_role_and_ends_with_the_reason():
    chunks = await read(ChatShape("m", "fp"), (0, delta("Hel")), (0, delta("lo\n", finish="stop")))
    parsed = [ChatCompletionChunk.model_validate(c) for c in chunks]
    assert [c.choices[0].delta.role for c in parsed] == ["assistant", None, None]
    assert "".join(c.choices[0].delta.content or "" for c in parsed) == "Hello\n"
    assert [c.choices[0].finish_reason for c in parsed] == [None, None, "stop"]
    assert len({c.id for c in parsed}) == 1
    assert parsed[0].system_fingerprint == "fp"


async def test_usage_comes_last_without_choices_and_is_null_before():
    chunks = await read(ChatShape("m", "fp"), (0, delta("a", usage=(3, 1), finish="length")), usage=True)
    assert [c["usage"] for c in chunks[:-1]] == [None, None]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


async def test_a_delta_without_text_makes_no_chunk_unless_it_has_logprobs():
    assert len(await read(TextShape("m", "fp"), (0, delta(tokens=[3])), (0, delta("€", [4], "stop")))) == 1
    with_logprobs = await read(TextShape("m", "fp", Words()), (0, delta(tokens=[3])), (0, delta("€", [4], "stop")))
    assert [c["choices"][0]["logprobs"]["tokens"] for c in with_logprobs] == [["\\xe2\\x82"], ["\\xac"]]


async def test_several_prompts_share_a_stream_by_index():
    chunks = await read(
        TextShape("m", "fp"),
        (1, delta("b", finish="stop", usage=(2, 1))),
        (0, delta("a", finish="length", usage=(3, 1))),
        choices=2,
        usage=True,
    )
    assert [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks[:2]] == [(1, "b"), (0, "a")]
    assert chunks[-1]["usage"]["total_tokens"] == 7


async def test_offsets_count_what_was_sent_before():
    chunks = await read(TextShape("m", "fp", Words()), (0, delta("Hel", [1])), (0, delta("lo", [2], "stop")))
    assert [c["choices"][0]["logprobs"]["text_offset"] for c in chunks] == [[0], [3]]


@pytest.mark.parametrize(
    ("deltas", "failure", "said"),
    [
        ([(0, delta("a"))], OutOfMemoryError("host has 1 byte left"), "1 byte left"),
        ([(0, delta("a"))], RuntimeError("secret"), "internal error"),
        ([(0, delta("a"))], None, "without a finish reason"),
        ([(0, delta(finish="error", error=OutOfMemoryError("device is full")))], None, "device is full"),
        ([(0, delta(finish="error"))], None, "failed"),
        ([(0, delta(finish="cancelled"))], None, "cancelled"),
    ],
)
async def test_a_failure_in_mid_stream_is_an_event(deltas, failure, said):
    chunks = await read(TextShape("m", "fp"), *deltas, failure=failure, usage=True)
    assert said in chunks[-1]["error"]["message"]
    assert "secret" not in json.dumps(chunks)


async def test_a_client_that_hangs_up_closes_the_source():
    closed = []

    async def source():
        try:
            while True:
                yield 0, delta("a")
        finally:
            closed.append(True)

    stream = events(TextShape("m", "fp"), source(), 1, False)
    await anext(stream)
    await stream.aclose()
    assert closed == [True]


def test_whole_responses_are_what_the_official_client_reads():
    tokens = list(delta(tokens=[1, 2]).tokens)
    done = Choice(0, "Hello", tokens, "stop")
    chat = ChatCompletion.model_validate(ChatShape("m", "fp", Words()).response([done], Usage(3, 2)))
    content = chat.choices[0].logprobs.content
    assert chat.choices[0].message.content == "Hello"
    assert (content[0].token, content[0].bytes) == ("Hel", list(b"Hel"))
    assert content[1].top_logprobs[1].logprob == MIN_LOGPROB
    text = Completion.model_validate(TextShape("m", "fp", Words()).response([done], Usage(3, 2)))
    assert text.choices[0].logprobs.tokens == ["Hel", "lo"]
    assert text.choices[0].logprobs.token_logprobs == [-0.5, -0.5]
    assert text.choices[0].logprobs.top_logprobs[1] == {"lo": -0.5, "Hel": MIN_LOGPROB}
    assert text.usage.total_tokens == 5


def test_without_logprobs_the_field_is_null():
    assert TextShape("m", "fp").response([Choice(0, "a", [], "stop")], Usage(1, 1))["choices"][0]["logprobs"] is None
