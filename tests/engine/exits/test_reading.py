"""Profiles of given text, against transformers position by position; and of two models that read the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from deploy.cli.app import app
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.exits.profile import ExitProfile
from engine.exits.reading import JointProfile, Reader, read_jointly
from engine.spec import Exit
from tests.engine.test_parity import oracle, random_tokens
from tests.engine.tiny import save_tiny

from .random_heads import WIDTH, add_heads, exit_logits

EXITS = [Exit(1, "norm"), Exit(2, "adapter", WIDTH)]
TEXTS = [random_tokens(length, seed=length) for length in (2, 63, 64, 65, 150)]


@pytest.fixture
def model(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model("llama"), tmp_path / "llama")


def reader(model: Path, **fields: object) -> Reader:
    return Reader(EngineConfig(str(model), dtype="float32", threads=1, kv_tokens=512, **fields))  # type: ignore[arg-type]


def test_every_position_counts_as_transformers_has_it(model: Path) -> None:
    heads = add_heads(model, EXITS)
    wanted = ExitProfile((1, 2, 3))
    with reader(model) as reading:
        for text in TEXTS:
            confidences = reading.read(text)
            whole = oracle(model, text)[:-1]
            said = {at.layer: exit_logits(model, at, heads, text)[:-1] for at in EXITS} | {3: whole}
            for layer, logits in said.items():
                top = logits.softmax(-1).max(-1)
                nll = -logits.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0]
                np.testing.assert_allclose(confidences[layer], top.values, atol=1e-5)
                wanted.add(layer, top.values.numpy(), (top.indices == whole.argmax(-1)).numpy(), nll.numpy())
        found = reading.profile
    for layer in (1, 2, 3):
        assert found.positions(layer) == sum(map(len, TEXTS)) - len(TEXTS)
        assert found.agreement(layer) == pytest.approx(wanted.agreement(layer), abs=0.01)
        assert found.mean_nll(layer) == pytest.approx(wanted.mean_nll(layer), abs=1e-4)
    assert found.agreement(3) == 1


def test_where_one_model_is_unsure_another_may_be_sure(model: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", seed=1)
    add_heads(model, EXITS)
    add_heads(other, EXITS[:1])
    with reader(model) as first, reader(other) as second:
        joint = read_jointly(first, second, TEXTS)
        one = [first.read(text) for text in TEXTS]
        two = [second.read(text) for text in TEXTS]
    mine, theirs = (np.concatenate([each[layer] for each in read]) for read, layer in ((one, 2), (two, 1)))
    unsure = mine < 0.15
    assert joint.positions() == len(mine)
    share, rescued = joint.rescued((2, 0.15), (1, 0.0))
    assert (share, rescued) == (pytest.approx(unsure.mean()), 1)
    _, rescued = joint.rescued((2, 0.15), (1, 0.05))
    assert rescued == pytest.approx((theirs[unsure] >= 0.05).mean())
    assert joint.rescued((1, 0.0), (3, 0.5)) == (0, 0)
    again = JointProfile.from_dict(json.loads(json.dumps(joint.to_dict())))
    assert again.rescued((2, 0.15), (1, 0.05)) == (share, rescued)


def test_what_cannot_be_read_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this model has no exits"):
        reader(model)
    add_heads(model, EXITS)
    with reader(model, context=100) as reading:
        for text in ([], [5], random_tokens(100, seed=1)):
            with pytest.raises(ConfigError, match=rf"a text has {len(text)} tokens; this model reads from 2 to 99"):
                reading.read(text)
        other = save_tiny(tmp_path / "other", "qwen2")
        add_heads(other, EXITS)
        with reader(other) as stranger, pytest.raises(ConfigError, match="do not share a tokenizer"):
            read_jointly(reading, stranger, TEXTS)
    for content in ({}, {"version": 1, "first": [1], "second": [1], "counts": [[1]]}, None):
        with pytest.raises(ConfigError, match="is no joint profile"):
            JointProfile.from_dict(content)


def test_the_command_says_what_exits_make_of_a_file(model: Path, tmp_path: Path) -> None:
    add_heads(model, EXITS)
    text = tmp_path / "text.txt"
    text.write_text("some words of it " * 40)
    args = ["profile-exits", str(model), "--text", str(text), "--against", str(model)]
    quick = ["--set", "kv_tokens=512", "--against-set", "kv_tokens=512", "--tokens", "100"]
    shown = CliRunner().invoke(app, args + quick)
    assert shown.exit_code == 0, shown.stderr
    assert "99 positions" in shown.stdout
    assert "Less than 0.8 sure here" in shown.stdout
    told = json.loads(CliRunner().invoke(app, [*args, *quick, "--json"]).stdout)
    assert [ExitProfile.from_dict(profile).positions(3) for profile in told["profiles"]] == [99, 99]
    assert JointProfile.from_dict(told["joint"]).positions() == 99
    for wrong, words in (
        (["--tokens", "1"], "tokens is 1; it must be at least 2"),
        (["--text", "/nope.txt"], "/nope.txt cannot be read"),
    ):
        refused = CliRunner().invoke(app, args[:4] + quick + wrong)
        assert refused.exit_code == 1
        assert words in refused.stderr
    text.write_text("short")
    refused = CliRunner().invoke(app, args[:4])
    assert refused.exit_code == 1
    assert "no text of 16 tokens or more" in refused.stderr
