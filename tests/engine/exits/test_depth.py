"""A model cut at an exit: what transformers' own layers and the exit's head say, wherever weights and KV lie."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.random_model import save_random
from engine.checkpoint.index import Checkpoint
from engine.errors import CheckpointError, ConfigError
from engine.exits.heads import FILE
from engine.exits.save import save_heads
from engine.llm import LLM
from engine.request import SamplingParams
from engine.spec import Exit, ModelSpec
from tests.engine.test_parity import random_tokens
from tests.engine.tiny import CONFIGS

from .random_heads import WIDTH, add_heads, greedy, random_tensors

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [random_tokens(length, seed=length) for length in (1, 17, 40)]
EXITS = {
    "norm": Exit(1, "norm"),
    "adapter": Exit(2, "adapter", WIDTH),
    "block": Exit(1, "block"),
}
FAMILIES = ("llama", "opt", "qwen2", "mistral-window", "llama-one-kv-head-tied")


@pytest.fixture
def copied(tiny_model: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: shutil.copytree(tiny_model(name), tmp_path / name)


def tokens(model: Path, **config: Any) -> list[list[int]]:
    with LLM(model, dtype="float32", threads=1, **config) as llm:
        return [[token.id for token in done.tokens] for done in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("kind", EXITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_cut_model_says_what_its_layers_and_head_say(
    copied: Callable[[str], Path], tmp_path: Path, family: str, kind: str
) -> None:
    model, at = copied(family), EXITS[kind]
    heads = add_heads(model, [at])
    expected = [greedy(model, at, heads, prompt, GREEDY.max_tokens or 0) for prompt in PROMPTS]
    assert tokens(model, depth=at.layer, kv_tokens=1024) == expected
    layers = at.layer + (kind == "block")
    nowhere = {"disk": ["embedding", f"layers.0-{layers - 1}", "head"]}
    spilled = {"kv_tokens": 0, "kv_disk_tokens": 1024, "offload_dir": str(tmp_path / "offload")}
    assert tokens(model, depth=at.layer, weights=nowhere, **spilled) == expected


def test_any_layer_is_an_exit_of_a_model_that_shares_its_head(tiny_model: Callable[[str], Path]) -> None:
    model = tiny_model("llama")
    for layer in (1, 2):
        expected = [greedy(model, Exit(layer), {}, prompt, 8) for prompt in PROMPTS]
        assert tokens(model, depth=layer, exits="shared", kv_tokens=1024) == expected


def test_a_layerskip_checkpoint_loads_as_published(tmp_path: Path) -> None:
    """Its config is Llama's, of any of the three families it was published for; any layer may be an exit."""
    config = LlamaConfig(**{**CONFIGS["llama"].to_dict(), "num_hidden_layers": 4, "dtype": "bfloat16"})
    model = save_random(tmp_path / "layerskip", config)
    for layer in (1, 2, 3):
        expected = [greedy(model, Exit(layer), {}, prompt, 8) for prompt in PROMPTS]
        assert tokens(model, depth=layer, exits="shared", kv_tokens=1024) == expected
        assert tokens(model, depth=layer, exits=f"shared:{layer}", kv_tokens=1024) == expected
    whole = tokens(model, kv_tokens=1024)
    early: dict[str, Any] = {"exits": "shared:1,3", "kv_tokens": 1024}
    assert tokens(model, early_exit=True, exit_threshold=1.0, **early) == whole
    assert tokens(model, draft_depth=3, **early) == whole
    for wrong in ("shared:", "shared:0", "shared:4", "shared:2,1", "shared:1,x"):
        with pytest.raises(ConfigError, match="name layers from 1 to 3, each deeper than the one before"):
            LLM(model, exits=wrong)


def test_the_last_layer_is_the_whole_model(copied: Callable[[str], Path]) -> None:
    model = copied("llama")
    whole = tokens(model, kv_tokens=1024)
    add_heads(model, [EXITS["norm"]])
    assert tokens(model, depth=3, kv_tokens=1024) == whole == tokens(model, kv_tokens=1024)


def test_a_completion_says_its_depth_its_confidence_and_its_breaches(copied: Callable[[str], Path]) -> None:
    model, threshold = copied("llama"), 0.02
    add_heads(model, [Exit(1, "norm", threshold=threshold)])
    for depth, passed in ((1, 1), (None, 3)):
        with LLM(model, dtype="float32", kv_tokens=1024, depth=depth) as llm:
            done = llm.generate(PROMPTS, GREEDY)
            assert llm.engine.depth == passed
            for each in done:
                sure = [token.confidence for token in each.tokens]
                expected = sum(confidence < threshold for confidence in sure) if depth else 0
                assert (each.usage.depth, each.usage.breaches) == (passed, expected)
                assert each.usage.confidence == pytest.approx(sum(sure) / len(sure))
            assert llm.engine.stats().breaches == sum(each.usage.breaches for each in done)
            assert (sum(each.usage.breaches for each in done) > 0) == (depth is not None)


def test_less_depth_takes_less_memory_and_has_room_for_more_sequences(copied: Callable[[str], Path]) -> None:
    model = copied("llama")
    add_heads(model, [EXITS["norm"]])
    fields: dict[str, Any] = {"dtype": "float32", "kv_tokens": 1024}
    with LLM(model, **fields) as whole, LLM(model, **fields, depth=1) as cut:
        uses, fewer = (llm.engine.tiers["device"].by_use() for llm in (whole, cut))
        assert fewer["kv"] == uses["kv"] // 3
        assert fewer["weights"] < uses["weights"]


@pytest.mark.parametrize("depth", [0, -1, 2, 4, "1"])
def test_a_depth_without_a_head_is_refused(copied: Callable[[str], Path], depth: Any) -> None:
    model = copied("llama")
    add_heads(model, [EXITS["norm"]])
    with pytest.raises(ConfigError, match="depth is "):
        LLM(model, depth=depth)


def test_exits_that_are_no_file_are_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"exits is 'none\.safetensors', which is no file"):
        LLM(tiny_model("llama"), exits="none.safetensors")
    with pytest.raises(ConfigError, match="it has exits at none"):
        LLM(tiny_model("llama"), depth=1)


def save(model: Path, exits: list[Exit], change: Callable[[dict[str, torch.Tensor]], object] = lambda _: None) -> None:
    spec = ModelSpec.from_directory(model)
    tensors = random_tensors(spec, exits)
    change(tensors)
    save_heads(model / FILE, Checkpoint(model), spec, exits, tensors)


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["exits.1.norm.weight"]


def put(layer: int, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({f"exits.{layer}.norm.weight": tensor})


@pytest.mark.parametrize(
    ("exits", "change", "words"),
    [
        ([Exit(3, "norm")], None, "an exit is at layer 3; this model has exits 1 to 2"),
        ([Exit(0, "norm")], None, "an exit is at layer 0"),
        ([Exit(2, "norm"), Exit(1, "norm")], None, r"exits at layers \[2, 1\]; each must be deeper"),
        ([Exit(1, "norm"), Exit(1, "norm")], None, "each must be deeper"),
        ([Exit(1, "norm", threshold=1.5)], None, "threshold 1.5; it must be 0 to 1"),
        ([Exit(1, "adapter", 0)], None, "has adapter_size 0"),
        ([Exit(1, "other")], None, "kind 'other'; there are shared, norm, adapter, block"),  # type: ignore[arg-type]
        ([Exit(1, "norm")], drop, "lacks 'exits.1.norm.weight' of the exit at layer 1"),
        ([Exit(1, "norm")], put(1, torch.ones(5)), r"has shape \[5\]; .* \[64\]"),
        ([Exit(1, "norm")], put(2, torch.ones(64)), "belongs to no exit"),
        ([Exit(1, "norm")], put(1, torch.ones(64).int()), "must be floating point"),
        ([], None, "lists no exits"),
    ],
)
def test_what_is_wrong_with_heads_is_named(
    copied: Callable[[str], Path], exits: list[Exit], change: Any, words: str
) -> None:
    model = copied("llama")
    save(model, exits, change or (lambda _: None))
    with pytest.raises(CheckpointError, match=words):
        LLM(model)


def test_heads_of_another_model_are_refused(copied: Callable[[str], Path]) -> None:
    model, other = copied("llama"), copied("qwen2")
    add_heads(model, [EXITS["norm"]])
    shutil.copy(model / FILE, other / FILE)
    with pytest.raises(CheckpointError, match="has heads for another model"):
        LLM(other)


def test_a_file_that_is_no_heads_is_refused(copied: Callable[[str], Path]) -> None:
    model = copied("llama")
    shutil.copy(model / "model.safetensors", model / FILE)
    with pytest.raises(CheckpointError, match="has no 'helios_exits' in its metadata"):
        LLM(model)
