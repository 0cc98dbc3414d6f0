"""``helios plan``: plans for machines that are not here, saved, edited, tried again and run."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from deploy.cli.app import app
from engine.llm import LLM
from engine.request import SamplingParams
from tests.engine.planner.machines import laptop
from tests.engine.tiny import save_tiny

JOB = ("--prompt-len", "40", "--gen-len", "8", "--sequences", "6")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIOS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    laptop().save(tmp_path / "machine.yaml")
    return tmp_path / "machine.yaml"


def helios(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_a_plan_is_shown_with_what_to_expect(tiny: Path, machine: Path) -> None:
    result = helios("plan", tiny, "--hardware", machine, "--budget", "20MB", *JOB)
    assert result.exit_code == 0, result.output
    for word in ("throughput", "latency of a block", "limited by", "weights", "kv_tokens", "capacity"):
        assert word in result.stdout


def test_json_has_everything(tiny: Path, machine: Path) -> None:
    made = json.loads(helios("plan", tiny, "--hardware", machine, "--budget", "20MB", "--json", *JOB).stdout)
    assert made["job"] == {"prompt_len": 40, "gen_len": 8, "n_sequences": 6}
    assert made["prediction"]["throughput"] > 0
    assert made["prediction"]["memory"]["device"]["capacity"] == 20_000_000
    assert made["settings"]["max_sequences"] <= 6


def test_a_saved_plan_is_run(tiny: Path, machine: Path, tmp_path: Path) -> None:
    path, picture = tmp_path / "plan.yaml", tmp_path / "sweep.png"
    result = helios("plan", tiny, "--hardware", machine, "--budget", "20MB", "-o", path, "--picture", picture, *JOB)
    assert result.exit_code == 0, result.output
    assert picture.stat().st_size > 1000
    prompts, params = [[5 + i] * 30 for i in range(6)], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(tiny), plan=str(path), offload_dir=str(tmp_path)) as planned, LLM(str(tiny), dtype="bfloat16") as free:
        assert planned.engine.config.max_sequences == yaml.safe_load(path.read_text())["settings"]["max_sequences"]
        assert [c.tokens[0].id for c in planned.generate(prompts, params)] == [
            c.tokens[0].id for c in free.generate(prompts, params)
        ]


def test_an_edited_plan_is_tried_again_and_refused_with_the_term(tiny: Path, machine: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    helios("plan", tiny, "--hardware", machine, "--budget", "20MB", "-o", path, *JOB)
    assert helios("plan", tiny, "--hardware", machine, "--check", path).exit_code == 0
    content = yaml.safe_load(path.read_text())
    content["settings"]["kv_tokens"] = 10**7
    path.write_text(yaml.safe_dump(content))
    result = helios("plan", tiny, "--hardware", machine, "--check", path)
    assert result.exit_code == 1
    assert "KV cache of 10000000 positions" in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--hardware", "pdp-11"), "pdp-11"),
        (("--budget", "lots"), "'lots' is not a size"),
        (("--budget", "900GiB"), "budget is 900.00 GiB and 'laptop' has"),
        (("--budget", "100KB"), "no plan fits"),
        (("--budget", "0"), "give a size above 0"),
        (("--disk-budget", "999TB"), "disk-budget is"),
        (("--latency-limit", "nan"), "latency-limit is nan"),
        (("-o", ""), "is no file that could be written"),
        (("--picture", "x.bmp"), "its name must end in .png"),
        (("--prompt-len", "0"), "prompt_len is 0"),
        (("--prompt-len", "100000"), "at most"),
        (("--depth", "9"), "layers 1 to 3"),
        (("--latency-limit", "-1"), "latency-limit is -1"),
        (("--dtype", "float8"), "float8"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny: Path, machine: Path, args: tuple[str, str], words: str) -> None:
    result = helios("plan", tiny, "--hardware", machine, "--prompt-len", "40", "--sequences", "4", *args)
    assert result.exit_code == 1, result.output
    assert words in result.output


def test_without_a_profile_it_says_how_to_get_one(tiny: Path) -> None:
    result = helios("plan", tiny)
    assert result.exit_code == 1
    assert "run `helios profile`" in result.output
