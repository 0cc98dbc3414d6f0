"""Names are found where they should be, and what is missing is said with a remedy. A staged directory is whole."""

from pathlib import Path

import pytest

from engine.checkpoint import store
from engine.checkpoint.staging import staged
from engine.errors import ConfigError, HeliosError, ModelNotFoundError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HELIOS_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def _add(*names: str) -> None:
    for name in names:
        (store.models_dir() / name).mkdir(parents=True)


def test_home_is_the_environment_s_or_the_cache(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    assert store.home() == home
    assert store.home({}) == Path.home() / ".cache" / "helios"
    with pytest.raises(ConfigError, match="absolute"):
        store.home({"HELIOS_HOME": "here"})


def test_a_home_that_cannot_be_made_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HELIOS_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(ConfigError, match=r"file/home, .* cannot be made: Not a directory; set HELIOS_HOME"):
        store.list_models()


def test_an_existing_directory_comes_before_a_name(tmp_path: Path) -> None:
    _add("small")
    assert store.resolve("small") == store.models_dir() / "small"
    (tmp_path / "small").mkdir()
    assert store.resolve("small") == Path("small")
    assert store.resolve(str(tmp_path / "small")) == tmp_path / "small"


def test_an_unknown_name_says_what_there_is_and_what_to_do() -> None:
    _add("small-1b", "other", ".small.partial")
    with pytest.raises(ModelNotFoundError, match=r"did you mean small-1b\?.*other, small-1b;.*models pull smal-1b"):
        store.resolve("smal-1b")


def test_an_empty_store_and_a_missing_path_are_said() -> None:
    with pytest.raises(ModelNotFoundError, match="no models yet"):
        store.resolve("small")
    with pytest.raises(ModelNotFoundError, match="no model directory /nowhere"):
        store.resolve("/nowhere")
    with pytest.raises(ModelNotFoundError):
        store.resolve("")


def test_origin_survives(tmp_path: Path) -> None:
    assert store.read_origin(tmp_path).source == str(tmp_path)
    store.write_origin(tmp_path, store.Origin("hub a/b", "MIT"))
    assert store.read_origin(tmp_path) == store.Origin("hub a/b", "MIT")


def test_a_staged_directory_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "a" / "model"
    with staged(target) as temporary:
        (temporary / "file").touch()
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()

    def fail() -> None:
        with staged(target, replace=True) as temporary:
            (temporary / "new").touch()
            raise error

    with pytest.raises(error):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (target / "old").exists()


def test_a_directory_in_the_way_is_replaced_only_on_request(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(HeliosError, match="there already"), staged(target):
        pass
    with staged(target, replace=True) as temporary:
        (temporary / "new").touch()
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_is_said_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(HeliosError, match="model could not be written: No space left"), staged(tmp_path / "model"):
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())
