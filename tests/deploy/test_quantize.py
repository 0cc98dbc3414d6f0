"""``helios quantize``, and how the other commands show what it made."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deploy.cli.app import app
from tests.engine.tiny import save_tiny


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HELIOS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "home" / "models"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny")


def helios(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_a_copy_goes_to_the_store_under_a_name_that_says_what_it_is(tiny: Path, store: Path) -> None:
    result = helios("quantize", tiny, "--group-size", "32")
    assert result.exit_code == 0, result.output
    assert "4 bits, groups of 32 along the input is in" in result.stdout
    shown = json.loads(helios("models", "show", "tiny-4bit", "--json").stdout)
    assert shown["quantised"] == "4 bits, groups of 32 along the input"
    assert (
        shown["weight_bytes"]["bfloat16"]
        < json.loads(helios("models", "show", tiny, "--json").stdout)["weight_bytes"]["bfloat16"]
    )
    listed = {entry["name"]: entry for entry in json.loads(helios("models", "list", "--json").stdout)}
    assert listed["tiny-4bit"]["quantised"] == shown["quantised"]
    assert "4 bits" in helios("models", "list").stdout


def test_a_copy_may_go_anywhere_and_be_imported_from_there(tiny: Path, tmp_path: Path, store: Path) -> None:
    result = helios("quantize", tiny, "--bits", "8", "--group-size", "0", "-o", tmp_path / "q8", "--lm-head", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["scheme"] == "8 bits, one group along the input"
    assert Path(record["directory"]) == tmp_path / "q8"
    assert record["copy_bytes"] < record["source_bytes"]
    assert helios("models", "import", tmp_path / "q8", "--copy").exit_code == 0
    assert (store / "q8" / "helios.safetensors").is_file()


def test_groups_that_do_not_fit_are_an_error_of_one_line(tiny: Path, store: Path) -> None:
    result = helios("quantize", tiny, "--group-size", "64")
    assert result.exit_code == 1
    assert "groups of 64; choose a group size that divides 96" in result.stderr
    assert not list(store.glob("*"))


@pytest.mark.parametrize("name", ["-x", "a b", ""])
def test_a_name_that_the_store_cannot_have_is_refused(tiny: Path, name: str, tmp_path: Path) -> None:
    result = helios("quantize", tiny, f"--out={name}", "--group-size", "32")
    assert result.exit_code == 1
    assert "cannot name a model" in result.stderr


def test_an_existing_copy_is_replaced_on_request_only(tiny: Path) -> None:
    assert helios("quantize", tiny, "--group-size", "32").exit_code == 0
    assert "--force" in helios("quantize", tiny, "--group-size", "32").stderr
    assert helios("quantize", tiny, "--group-size", "32", "--force").exit_code == 0
