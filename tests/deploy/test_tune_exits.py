"""``helios tune-exits`` and ``depth`` on the command line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.config import model_config
from deploy.cli.app import app
from tests.engine.tiny import save_tiny

Run = Callable[..., tuple[int, str, str]]
SMALL = ("--exits", "1,2", "--generate", "20000", "--width", "16", "--epochs", "1", "--threads", "1")


@pytest.fixture
def helios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("HELIOS_HOME", str(tmp_path / "home"))

    def run(*args: object) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, [str(arg) for arg in args])
        return result.exit_code, result.stdout, result.stderr

    return run


def test_heads_are_made_and_a_model_runs_up_to_them(helios: Run, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "llama")
    code, out, err = helios("tune-exits", model, *SMALL, "--json")
    assert code == 0, err
    assert [found["layer"] for found in json.loads(out)["exits"]] == [1, 2]
    code, out, _ = helios("tune-exits", model, *SMALL)
    assert code == 0
    assert "Held-out tokens of that confidence, and how many agree" in out
    assert max(map(len, out.splitlines())) <= 80
    code, out, err = helios("generate", "hello", "--model", model, "--set", "depth=1", "-n", 4)
    assert code == 0, err
    shutil.move(model / "exits.safetensors", tmp_path / "heads.safetensors")
    heads = f"exits={tmp_path / 'heads.safetensors'}"
    assert helios("generate", "hello", "--model", model, "--set", "depth=2", "--set", heads, "-n", 4)[0] == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--exits", ""), "write layers as 10,15,20"),
        (("--exits", "3"), "give layers from 1 to 2"),
        (("--learning-rate", "nan"), "learning-rate is nan"),
        (("--width", "0"), "width is 0"),
        (("--head", "mlp"), "head is 'mlp'; it must be one of norm, adapter, block"),
        (("--head", "norm", "--head", "norm"), "name each kind once"),
        (("--loss", "mse"), "loss is 'mse'; it must be one of kl, cross-entropy"),
        (("--text", "/nope.txt"), "/nope.txt cannot be read"),
        (("-o", "/dev/full"), "is no file that could be written"),
    ],
)
def test_what_makes_no_sense_is_refused(helios: Run, tmp_path: Path, args: tuple[str, ...], words: str) -> None:
    code, _, err = helios("tune-exits", save_tiny(tmp_path / "llama"), *args)
    assert code == 1
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_files_of_heads_are_found_from_the_configuration_s_directory() -> None:
    assert model_config("m", {"exits": "shared"}).exits == "shared"
    assert model_config("m", {"exits": "heads.safetensors", "depth": 3}).exits == str(
        Path("heads.safetensors").resolve()
    )
