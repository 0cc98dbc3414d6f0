"""``helios profile``: what it is asked for reaches the measuring, and what was measured is kept and shown."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from deploy.cli.app import app
from engine.errors import ConfigError
from engine.planner.hardware import Hardware
from engine.planner.profile import machine
from engine.planner.profile.identity import identity
from engine.planner.profile.store import profile_path, stored_profile


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIOS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def measured(own_home: None) -> Hardware:
    """What stands for this machine's figures."""
    return replace(Hardware.load("laptop-cpu"), name="box", identity=identity())


@pytest.fixture
def asked(measured: Hardware, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Whatever measuring was asked for, instead of doing it."""
    calls: list[dict[str, Any]] = []

    def measure(device: str, **options: Any) -> Hardware:
        options.pop("progress")("products", 1, 1)
        calls.append({"device": device, **options})
        return measured

    monkeypatch.setattr(machine, "profile_machine", measure)
    return calls


def helios(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["profile", *map(str, args)])


def test_the_help_has_examples() -> None:
    result = helios("--help")
    assert result.exit_code == 0
    assert "helios profile --quick" in result.output


def test_a_profile_is_kept_and_shown(asked: list[dict[str, Any]], measured: Hardware) -> None:
    result = helios()
    assert result.exit_code == 0, result.output
    assert asked == [{"device": "auto", "offload_dir": None, "quick": False}]
    assert stored_profile() == measured
    assert f"in {profile_path()}" in result.stdout
    assert "box: A laptop without a GPU" in result.stdout
    assert "products of the device, FLOP/s" in result.stdout
    shown = [line.split() for line in result.stdout.splitlines()]
    assert ["1", "25", "G"] in shown
    assert ["device.layer_s", "100.0", "us"] in shown
    assert ["disk_read", "2.33", "GiB/s"] in shown
    assert ["read_cpu_s", "0.086", "s/GiB"] in shown


def test_options_reach_the_measuring(asked: list[dict[str, Any]], tmp_path: Path, measured: Hardware) -> None:
    out = tmp_path / "other" / "box.yaml"
    result = helios("--quick", "--device", "cpu", "--offload-dir", tmp_path, "-o", out, "--json")
    assert result.exit_code == 0, result.output
    assert asked == [{"device": "cpu", "offload_dir": tmp_path, "quick": True}]
    assert Hardware.load(out) == measured
    assert stored_profile() is None
    record = json.loads(result.stdout)
    assert record["path"] == str(out)
    assert record["stale"] is None
    assert record["hardware"]["disk_read"] == 2.5e9


def test_the_stored_profile_is_shown_without_measuring(asked: list[dict[str, Any]], measured: Hardware) -> None:
    measured.save(profile_path())
    result = helios("--show")
    assert result.exit_code == 0, result.output
    assert "disk_read" in result.stdout
    assert result.stderr == ""
    assert json.loads(helios("--show", "--json").stdout)["hardware"]["name"] == "box"
    assert asked == []


def test_a_stale_profile_is_said_to_be_one(measured: Hardware) -> None:
    replace(measured, identity={**identity(), "cpu": "8086"}).save(profile_path())
    result = helios("--show")
    assert result.exit_code == 0
    assert "warning: the profile 'box' does not fit any more (cpu: 8086 → " in result.stderr
    assert "8086" in json.loads(helios("--show", "--json").stdout)["stale"]


def test_a_profile_that_was_never_made_cannot_be_shown() -> None:
    result = helios("--show")
    assert result.exit_code == 1
    assert f"error: there is no profile of this machine in {profile_path()}" in result.stderr


def test_showing_takes_no_options_of_measuring() -> None:
    result = helios("--show", "--quick")
    assert result.exit_code == 1
    assert "--quick" in result.stderr
    assert "--offload-dir" in helios("--show", "--offload-dir", "x").stderr


def test_what_cannot_be_measured_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Hardware:
        raise ConfigError("the disk is full; free space")

    monkeypatch.setattr(machine, "profile_machine", refuse)
    result = helios()
    assert result.exit_code == 1
    assert result.stderr == "error: the disk is full; free space\n"
    assert stored_profile() is None


@pytest.mark.parametrize("out", ["file/box.yaml", "folder"])
def test_a_place_that_cannot_be_written_to_is_named_before_measuring(
    asked: list[dict[str, Any]], tmp_path: Path, out: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    result = helios("-o", tmp_path / out)
    assert result.exit_code == 1
    assert f"{tmp_path / out}" in result.stderr
    assert "choose another file with -o" in result.stderr
    assert asked == []
