"""A model that serves at full depth and scores its exits: what each of them says by itself, wherever things lie."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import ConfigError, UnsupportedModelError
from engine.exits.profile import ExitProfile
from engine.llm import LLM
from engine.request import SamplingParams
from engine.spec import Exit
from tests.engine.test_parity import oracle, random_tokens

from .random_heads import WIDTH, add_heads, exit_logits

EXITS = [Exit(1, "norm"), Exit(2, "adapter", WIDTH)]
PROMPTS = [random_tokens(length, seed=length) for length in (1, 17, 40, 5)]
PARAMS = [
    SamplingParams(temperature=temperature, seed=number, max_tokens=6 + number, ignore_eos=True)
    for number, temperature in enumerate((0.0, 1.0, 0.0, 0.7))
]
NOWHERE = {"disk": ["embedding", "layers.0-2", "head"]}
PLACES: dict[str, dict[str, Any]] = {
    "in memory": {"kv_tokens": 1024},
    "on disk": {"weights": NOWHERE, "kv_tokens": 0, "kv_disk_tokens": 1024, "prefill_rows": 20},
    "states on disk": {"activation_rows": 0, "activation_disk_rows": 60, "prefill_rows": 40, "tile_rows": 3},
}


def expected(model: Path, heads: dict[str, torch.Tensor], made: list[list[int]]) -> ExitProfile:
    """Counted from transformers' logits, one sequence after another."""
    profile = ExitProfile([at.layer for at in EXITS])
    for prompt, tokens in zip(PROMPTS, made, strict=True):
        text = prompt + tokens
        rows = slice(len(prompt) - 1, len(text) - 1)
        best = oracle(model, text)[rows].argmax(-1)
        for at in EXITS:
            said = exit_logits(model, at, heads, text)[rows].log_softmax(-1)
            nll = -said.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            top = said.max(-1)
            profile.add(at.layer, top.values.exp().numpy(), (top.indices == best).numpy(), nll.numpy())
    return profile


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "opt"])
def test_a_profile_counts_what_each_exit_says(
    tiny_model: Callable[[str], Path], tmp_path: Path, family: str, place: str
) -> None:
    model = shutil.copytree(tiny_model(family), tmp_path / family)
    heads = add_heads(model, EXITS)
    fields = {"dtype": "float32", "threads": 1, "max_sequences": 4, "offload_dir": str(tmp_path / "offload")}
    with LLM(model, score_exits=True, **fields, **PLACES[place]) as llm:
        made = [[token.id for token in done.tokens] for done in llm.generate(PROMPTS, PARAMS)]
        found = llm.engine.exit_profile
        assert sum(llm.engine.tiers["device"].by_use().values()) <= llm.engine.tiers["device"].capacity_bytes
    with LLM(model, **fields, **PLACES[place]) as llm:
        assert made == [[token.id for token in done.tokens] for done in llm.generate(PROMPTS, PARAMS)]
    assert found is not None
    wanted = expected(model, heads, made)
    for at in EXITS:
        assert found.positions(at.layer) == sum(map(len, made))
        assert found.agreement(at.layer) == pytest.approx(wanted.agreement(at.layer), abs=0.04)
        assert found.mean_confidence(at.layer) == pytest.approx(wanted.mean_confidence(at.layer), abs=1e-4)
        assert found.mean_nll(at.layer) == pytest.approx(wanted.mean_nll(at.layer), abs=1e-3)


def test_shared_exits_are_scored_with_the_model_s_own_head(tiny_model: Callable[[str], Path]) -> None:
    model = tiny_model("llama")
    with LLM(model, dtype="float32", kv_tokens=256, exits="shared", score_exits=True) as llm:
        made = [token.id for token in llm.generate([[5, 6, 7]], PARAMS[:1])[0].tokens]
        found = llm.engine.exit_profile
    assert found is not None
    said = exit_logits(model, Exit(2), {}, [5, 6, 7, *made])[2:-1].log_softmax(-1)
    assert found.mean_confidence(2) == pytest.approx(float(said.max(-1).values.exp().mean()), abs=1e-4)
    assert np.isclose(found.positions(1), len(made))


def test_what_cannot_be_scored_is_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this model has no exits"):
        LLM(tiny_model("llama"), score_exits=True)
    with pytest.raises(ConfigError, match="score_exits is set and depth is 1; it needs the whole model"):
        LLM(tiny_model("llama"), score_exits=True, exits="shared", depth=1)
    with pytest.raises(ConfigError, match="score_exits is 1; it must be true or false"):
        LLM(tiny_model("llama"), score_exits=1)
    model = shutil.copytree(tiny_model("llama"), tmp_path / "llama")
    add_heads(model, [Exit(1, "block")])
    with pytest.raises(UnsupportedModelError, match="has a block"):
        LLM(model, score_exits=True)
