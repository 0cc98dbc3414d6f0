"""Plans as files: read back as they were, refused where they say nonsense."""

from pathlib import Path

import pytest
import yaml

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.planner.job import Job
from engine.planner.plan import Plan

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
        ({"job": {"prompt_len": 3}}, "needs prompt_len and gen_len"),
        ({"job": {"prompt_len": 3, "gen_len": 1, "x": 1}}, "'x'"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({**Plan.of(CONFIG, "laptop", Job(100, 20)).to_dict(), **change}))
    with pytest.raises(ConfigError, match=words):
        Plan.load(path)


@pytest.mark.parametrize("content", ["", "- 1", "a: [", "\x00"])
def test_files_that_are_something_else(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"plan\.yaml"):
        Plan.load(tmp_path / "plan.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        Plan.load(tmp_path / "none.yaml")
