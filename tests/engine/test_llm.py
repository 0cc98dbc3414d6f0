"""What is given to LLM by mistake is said in words."""

from dataclasses import replace

import pytest

from engine.errors import ConfigError, EngineDeadError, InvalidRequestError
from engine.llm import LLM
from engine.request import SamplingParams

TWO = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    from tests.engine.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(directory):
    return LLM(directory, dtype="float32", kv_tokens=1024)


def test_sizes_may_be_text_and_the_model_a_path(directory):
    with LLM(directory, memory_bytes="200MB", kv_tokens=256) as llm:
        assert llm.engine.config.memory_bytes == 200 * 10**6


@pytest.mark.parametrize(
    ("model", "config", "said"),
    [
        (5, {}, "model is 5; it must be a name"),
        ("any", {"memory_bytes": "2 elephants"}, "'2 elephants' is not a size"),
        ("any", {"memory_bytes": 1.5}, "memory_bytes is 1.5; it must be a whole number"),
        ("any", {"context": "x"}, "context is 'x'; it must be a whole number"),
        ("any", {"value_share": "0.5"}, "value_share is '0.5'; it must be a number above 0 and at most 1"),
        ("any", {"delegate": None}, "delegate is None; it must be true or false"),
        ("any", {"weights": ["embedding"]}, "weights is ['embedding']; it must give units to tiers"),
        ("any", {"weights": {"disk": "head"}}, "weights: disk is 'head'; it must be a list as"),
        ("any", {"weights": {"disk": [3]}}, "weights: disk is [3]; it must be a list as"),
        ("any", {"device": 0}, "device is '0'; it must be auto"),
        ("any", {"max_sequence": 2}, "'max_sequence' is no setting of the engine; did you mean max_sequences?"),
    ],
)
def test_a_wrong_setting_is_named(model, config, said):
    with pytest.raises(ConfigError) as caught:
        LLM(model, **config)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda llm: llm.generate(["x"], {"max_tokens": 2}), "params is {'max_tokens': 2}; give SamplingParams"),
        (lambda llm: llm.generate(["x"], [{"max_tokens": 2}]), "params is {'max_tokens': 2}; give SamplingParams"),
        (lambda llm: list(llm.stream("x", 5)), "params is 5"),
        (lambda llm: llm.generate(5), "prompts is 5; it must be text"),
        (lambda llm: llm.generate([1, "a"], TWO), "a prompt is 1; it must be text or a list of token ids"),
        (lambda llm: llm.generate([None], TWO), "a prompt is None"),
        (lambda llm: llm.chat("hi", TWO), "messages is 'hi'; it must be a list like"),
        (lambda llm: llm.chat([5], TWO), "messages is [5]; it must be a list like"),
        (lambda llm: list(llm.run(["x"])), "run was given 'x'; make requests with request(prompt, params)"),
    ],
)
def test_a_wrong_argument_is_named(llm, call, said):
    with pytest.raises(InvalidRequestError) as caught:
        call(llm)
    assert said in str(caught.value)


def test_a_closed_engine_ends_what_runs_and_takes_no_more(directory):
    llm = LLM(directory, dtype="float32", kv_tokens=256)
    stream = llm.stream([3, 4, 5], replace(TWO, max_tokens=20))
    assert next(stream).finish_reason is None
    llm.close()
    last = list(stream)[-1]
    assert (last.finish_reason, str(last.error)) == ("error", "the engine was closed before the request was done")
    with pytest.raises(EngineDeadError, match="the engine is closed and takes no more requests"):
        llm.generate([[3, 4, 5]], TWO)


def test_one_prompt_or_many_as_text_or_ids(llm):
    assert [c.prompt_ids for c in llm.generate([5, 6], TWO)] == [(5, 6)]
    assert [c.prompt_ids for c in llm.generate([[5], (6,)], [TWO, TWO])] == [(5,), (6,)]
    assert len(llm.generate("hello", TWO)) == len(llm.generate(("hello",), TWO)) == 1
    assert llm.generate([], TWO) == []
