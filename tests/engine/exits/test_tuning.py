"""Heads are trained on a tiny model: states are the model's own, training helps, what was done is not done again."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError, UnsupportedModelError
from engine.llm import LLM
from engine.request import SamplingParams
from engine.text.tokenizer import Tokenizer
from engine.tuning.states import States, collect
from engine.tuning.text import own_windows, read_texts, split, windows
from engine.tuning.train import Settings
from engine.tuning.tune import figures, tune
from tests.engine.test_parity import random_tokens

SETTINGS = Settings(epochs=20, batch=128, evaluate_every=50, learning_rate=3e-3)


@pytest.fixture
def model(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model("llama"), tmp_path / "llama")


def config(model: Path) -> EngineConfig:
    return EngineConfig(str(model), dtype="float32", kv_tokens=4096, threads=1)


def texts() -> list[list[int]]:
    return [random_tokens(20 + number % 40, seed=number) for number in range(60)]


def test_states_are_those_of_transformers(model: Path, tmp_path: Path) -> None:
    given = texts()[:7]
    states = collect(config(model), [1, 2], given, tmp_path / "states")
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        found = [reference.model(torch.tensor([window]), output_hidden_states=True) for window in given]
    assert states.count == sum(map(len, given))
    for layer in (1, 2):
        expected = torch.cat([one.hidden_states[layer][0] for one in found])
        torch.testing.assert_close(states.of(layer).float(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(
        states.final.float(), torch.cat([one.last_hidden_state[0] for one in found]), atol=2e-2, rtol=2e-2
    )
    again = States.open(tmp_path / "states")
    assert again == states


def test_training_makes_an_exit_agree_more_often_and_is_not_done_twice(model: Path, tmp_path: Path) -> None:
    told: list[str] = []
    asked: list[int] = []

    def text() -> list[list[int]]:
        asked.append(1)
        return texts()

    def run(settings: Settings = SETTINGS) -> list[dict[str, object]]:
        told.clear()

        def tell(step: str, *_: int) -> None:
            told.append(step.partition(",")[0])

        heads = tmp_path / "heads.safetensors"
        made = tune(config(model), [1, 2], text, tmp_path / "work", heads, width=32, settings=settings, progress=tell)
        return figures(made)

    first = run()
    assert asked == [1]
    assert {"states", "exit 1", "exit 2"} <= set(told)
    assert run() == first
    assert asked == [1]
    assert told == []
    untrained = run(replace(SETTINGS, epochs=1))
    assert asked == [1]
    for trained, one in zip(first, untrained, strict=True):
        assert trained["agreement"] >= one["agreement"] > 5 / 320  # type: ignore[operator]
        json.dumps(trained)
    heads = {"exits": str(tmp_path / "heads.safetensors")}
    with LLM(model, dtype="float32", kv_tokens=256, depth=2, **heads) as llm:
        done = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
        assert len(done.tokens) == 4


def test_the_model_makes_its_own_text_the_same_for_the_same_seed(model: Path) -> None:
    given = config(model)
    made = own_windows(given, 300, length=50, seed=3)
    assert [len(window) for window in made] == [50] * 6
    assert made == own_windows(given, 300, length=50, seed=3)
    assert made != own_windows(given, 300, length=50, seed=4)


def test_files_become_windows(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words " * 30)
    (tmp_path / "b.jsonl").write_text('{"text": "' + "x" * 40 + '"}\n\n"' + "y" * 40 + '"\n{"prompt": "z"}\n')
    tokenizer = Tokenizer.load(model)
    found = list(windows(tokenizer, read_texts([tmp_path / "a.txt", tmp_path / "b.jsonl"]), 64))
    assert max(map(len, found)) == 64
    assert min(map(len, found)) >= 16
    for content, words in (("{}", 'line 1 has no text; write {"text"'), ("[", "line 1 is no JSON")):
        (tmp_path / "bad.jsonl").write_text(content)
        with pytest.raises(ConfigError, match=words):
            list(read_texts([tmp_path / "bad.jsonl"]))
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_texts([tmp_path / "none.txt"]))


def test_too_little_text_wrong_layers_and_other_norms_are_refused(
    model: Path, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    def attempt(model: Path, layers: list[int], text: list[list[int]]) -> None:
        out = tmp_path / "heads.safetensors"
        tune(config(model), layers, lambda: text, tmp_path / "w", out, width=8, settings=SETTINGS)

    with pytest.raises(ConfigError, match="there are 3 windows of text"):
        attempt(model, [1], texts()[:3])
    for layers in ([], [0], [3], [2, 1], [1, 1]):
        with pytest.raises(ConfigError, match="exits are at"):
            attempt(model, layers, texts())
    with pytest.raises(UnsupportedModelError, match="layer norms"):
        attempt(tiny_model("opt"), [1], texts())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="states cannot be kept"):
        collect(config(model), [1], texts(), tmp_path / "file" / "w")
    (tmp_path / "states.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        States.open(tmp_path)
    with pytest.raises(ConfigError, match="too few"):
        split([[1]], 0.5)
    assert not (tmp_path / "heads.safetensors").exists()
