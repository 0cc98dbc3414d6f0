"""Heads are trained on a tiny model: states are the model's own, training helps, what was done is not done again."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.checkpoint.index import Checkpoint
from engine.config import EngineConfig
from engine.errors import CheckpointError, ConfigError, UnsupportedModelError
from engine.exits.heads import read_heads
from engine.llm import LLM
from engine.request import SamplingParams
from engine.spec import Exit, ExitKind, ModelSpec
from engine.text.tokenizer import Tokenizer
from engine.tuning.head import Head
from engine.tuning.states import States, collect
from engine.tuning.text import own_windows, read_texts, split, windows
from engine.tuning.train import Loss, Settings
from engine.tuning.tune import figures, tune
from tests.engine.test_parity import random_tokens

from .random_heads import WIDTH, exit_logits, random_tensors
from .test_lossless import silence

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
    assert sorted(states.lengths) == sorted(map(len, given))
    given.sort(key=lambda window: states.lengths.index(len(window)))
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


KINDS = ("norm", "adapter", "block")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3-biases", "mistral-window"])
def test_a_head_in_training_is_what_serves(tiny_model: Callable[[str], Path], family: str, kind: ExitKind) -> None:
    model = tiny_model(family)
    at = Exit(1, kind, WIDTH if kind == "adapter" else 0)
    heads = random_tensors(ModelSpec.from_directory(model), [at])
    spec = ModelSpec.from_directory(model)
    texts = [random_tokens(length, seed=length) for length in (9, 40, 31)]
    head = Head(kind, 1, spec, {name.removeprefix("exits.1."): tensor for name, tensor in heads.items()})
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = [reference.model(torch.tensor([t]), output_hidden_states=True).hidden_states[1][0] for t in texts]
        said = reference.lm_head(head(torch.cat(states), [len(text) for text in texts]))
        expected = torch.cat([exit_logits(model, at, heads, text) for text in texts])
    torch.testing.assert_close(said, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("loss", ["kl", "cross-entropy"])
def test_every_kind_of_head_learns_and_the_first_is_written(model: Path, tmp_path: Path, loss: Loss) -> None:
    out, folder = tmp_path / "heads.safetensors", tmp_path / "work"
    settings = replace(SETTINGS, loss=loss)
    made = tune(
        config(model), [1, 2], texts, folder, out, kinds=["block", "norm", "adapter"], width=32, settings=settings
    )
    assert [(found.layer, found.kind) for found in made] == [
        (e, k) for e in (1, 2) for k in ("block", "norm", "adapter")
    ]
    untrained = replace(settings, learning_rate=1e-9)
    before = tune(
        config(model),
        [1, 2],
        texts,
        tmp_path / "w2",
        tmp_path / "h2",
        kinds=["block", "norm"],
        width=32,
        settings=untrained,
    )
    by_kind = {(found.layer, found.kind): found for found in made}
    for found in before:
        assert by_kind[found.layer, found.kind].agreement >= found.agreement
    for found in made:
        assert found.parameters > 0
        assert found.cost_layers == pytest.approx(found.parameters / (64 * (64 + 2 * 32 + 64) + 3 * 64 * 96))
        assert 0 <= found.calibration_error <= 1
    spec = ModelSpec.from_directory(model)
    heads = read_heads(out, Checkpoint(model), spec)
    assert [(at.layer, at.kind) for at in heads.exits] == [(1, "block"), (2, "block")]
    said = Counter(token for text in texts() for token in text)
    assert [said[token] for token in heads.frequent] == sorted(said.values(), reverse=True)
    with LLM(model, dtype="float32", kv_tokens=256, depth=1, exits=str(out)) as llm:
        assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))[0].finish_reason


def test_thresholds_are_calibrated_for_both_measures_of_confidence(model: Path, tmp_path: Path) -> None:
    """A head right after layers that do nothing more agrees always, so that any confidence will do."""
    silence(model, layers=(1, 2))
    out = tmp_path / "heads.safetensors"
    found = tune(config(model), [1], texts, tmp_path / "work", out, kinds=["norm"], width=8, settings=SETTINGS)
    assert found[0].agreement >= 0.95
    assert (found[0].threshold, found[0].margin_threshold) == (0, 0)
    heads = read_heads(out, Checkpoint(model), ModelSpec.from_directory(model))
    assert heads.exits == (Exit(1, "norm", threshold=0, margin_threshold=0),)


def test_damaged_text_in_the_work_folder_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('[1, 2]\n{"a": 1}\n')
    with pytest.raises(CheckpointError, match=r"text\.jsonl is damaged; remove it"):
        tune(config(model), [1], texts, tmp_path, tmp_path / "h", width=8, settings=SETTINGS)


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
