"""Getting models: names, imports and refusals, without a network."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli.app import app
from deploy.models.catalogue import CATALOGUE
from engine.checkpoint.store import DEFAULT_MODEL
from tests.engine.tiny import save_tiny

runner = CliRunner()


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HELIOS_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny-llama")


def test_the_default_model_is_in_the_catalogue_and_may_be_used_freely() -> None:
    assert CATALOGUE[DEFAULT_MODEL].licence == "Apache-2.0"
    assert len(CATALOGUE[DEFAULT_MODEL].sha256) == 64


def test_an_empty_store_lists_what_can_be_had() -> None:
    result = runner.invoke(app, ["models", "list", "--json"])
    assert result.exit_code == 0, result.output
    listed = {entry["name"]: entry for entry in json.loads(result.output)}
    assert set(CATALOGUE) <= set(listed)


def test_a_directory_is_imported_and_shown(tiny: Path, store: Path) -> None:
    imported = runner.invoke(app, ["models", "import", str(tiny)])
    assert imported.exit_code == 0, imported.output
    assert (store / "tiny-llama" / "config.json").is_file()
    shown = runner.invoke(app, ["models", "show", "tiny-llama", "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)["architecture"] == "llama"


def test_importing_twice_is_refused_without_force(tiny: Path) -> None:
    assert runner.invoke(app, ["models", "import", str(tiny)]).exit_code == 0
    again = runner.invoke(app, ["models", "import", str(tiny)])
    assert again.exit_code == 1
    assert "error:" in again.output
    assert runner.invoke(app, ["models", "import", str(tiny), "--force"]).exit_code == 0


def test_a_damaged_directory_is_refused_and_not_stored(tiny: Path, store: Path) -> None:
    weights = tiny / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = runner.invoke(app, ["models", "import", str(tiny)])
    assert result.exit_code == 1
    assert "truncated" in result.output
    assert "Traceback" not in result.output
    assert not store.exists() or not list(store.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pull", "no-such-model"], "not in the catalogue"),
        (["pull", "gemma3-270m"], "gemma3-270m cannot be pulled"),
        (["show", "no-such-model"], "no-such-model"),
        (["import", "/no/such/place"], "/no/such/place"),
    ],
)
def test_what_cannot_be_had_is_refused_with_a_remedy(arguments: list[str], words: str) -> None:
    result = runner.invoke(app, ["models", *arguments])
    assert result.exit_code == 1
    assert result.output.startswith("error: ")
    assert words in result.output
