"""Plans as files: read back as they were, refused where they say nonsense."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.planner.job import Job
from engine.planner.plan import Plan
from engine.planner.profile.store import profile_path

from .machines import laptop

CONFIG = EngineConfig(
    model="m",
    memory_bytes=10**8,
    kv_tokens=640,
    max_sequences=4,
    weights={"device": ["embedding", "layers.0-3", "head"]},
)


def test_a_plan_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    plan = Plan.of(CONFIG, "laptop", Job(100, 20, 4))
    plan.save(tmp_path / "deep" / "plan.yaml")
    read = Plan.load(tmp_path / "deep" / "plan.yaml")
    assert read == plan
    assert read.config() == CONFIG
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["plan.yaml"]


def test_only_what_differs_from_the_default_is_written() -> None:
    assert set(Plan.of(CONFIG, "laptop", Job(100, 20)).settings) == {
        "memory_bytes",
        "kv_tokens",
        "max_sequences",
        "weights",
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"helios_plan": 7}, "no plan of version"),
        ({"model": 3}, "model is 3"),
        ({"settings": []}, "settings is"),
        ({"settings": {"kv_toknes": 3}}, "kv_toknes"),
        ({"settings": {3: 3, "x": 4}}, "settings has 3"),
        ({"settings": {"weights": 3}}, "settings: weights is 3"),
        ({"settings": {"weights": {"disk": None}}}, "settings: weights: disk is None"),
        ({"settings": {"value_share": "x"}}, "settings: value_share is 'x'"),
        ({"quantize": True}, "quantize is True; it must be 4 or 8"),
        ({"helios_plan": True}, "no plan of version"),
        ({"job": {"prompt_len": 3}}, "needs prompt_len and gen_len"),
        ({"job": {"prompt_len": 3, "gen_len": 1, "x": 1}}, "'x'"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({**Plan.of(CONFIG, "laptop", Job(100, 20)).to_dict(), **change}))
    with pytest.raises(ConfigError, match=words):
        Plan.load(path)


@pytest.mark.parametrize("content", ["", "- 1", "a: [", "\x00", "job: 2026-13-13"])
def test_files_that_are_something_else(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"plan\.yaml"):
        Plan.load(tmp_path / "plan.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        Plan.load(tmp_path / "none.yaml")


def test_an_engine_that_is_to_plan_needs_a_measured_machine(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELIOS_HOME", str(tmp_path))
    model = str(tiny_model("llama"))
    with pytest.raises(ConfigError, match="run `helios profile` first"):
        Engine.load(EngineConfig(model=model, plan="auto"))
    laptop().save(profile_path())
    engine = Engine.load(EngineConfig(model=model, plan="auto", memory_bytes=20_000_000, max_sequences=4, context=64))
    try:
        assert engine.config.weights is not None
        assert engine.config.max_sequences <= 4
        assert engine.context == 64
    finally:
        engine.close()
