"""The model store: directories ``$HELIOS_HOME/models/NAME``, each a Hugging Face directory or a link to one.

Nothing is downloaded here; ``deploy.models`` fills the store.
"""

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import ConfigError, ModelNotFoundError
from ..spec import read_json

DEFAULT_MODEL = "smollm2-135m-instruct"
ORIGIN_FILE = "helios.json"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a model of the store came from. Unknown fields are empty."""

    source: str = ""
    """A hub id, a package, or the path it was imported from."""
    licence: str = ""


def home(environment: Mapping[str, str] | None = None) -> Path:
    """``$HELIOS_HOME``, or ``~/.cache/helios``. Raises ConfigError for a relative one, which would move about."""
    given = (os.environ if environment is None else environment).get("HELIOS_HOME")
    path = Path(given).expanduser() if given else Path.home() / ".cache" / "helios"
    if not path.is_absolute():
        raise ConfigError(f"HELIOS_HOME is '{given}'; it must be an absolute path")
    return path


def make_home() -> Path:
    """``home``, made if it is not there. Raises ConfigError if it cannot be."""
    path = home()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path}, where models and state are kept, cannot be made: {error.strerror}; "
            "set HELIOS_HOME to a directory of yours"
        ) from None
    return path


def models_dir() -> Path:
    """The folder of the store's models; it need not exist."""
    return home() / "models"


def list_models() -> tuple[str, ...]:
    """The names in the store, sorted."""
    folder = models_dir()
    if not folder.is_dir():
        make_home()
        return ()
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))


def resolve(name_or_path: str) -> Path:
    """The directory of a model given as a path or as a name in the store. A directory that exists comes first.

    Raises ModelNotFoundError that says where was looked, what there is, and how to get more.
    """
    path = Path(name_or_path).expanduser()
    if name_or_path and path.is_dir():
        return path
    names = list_models()
    if name_or_path in names:
        return models_dir() / name_or_path
    if path.is_absolute() or name_or_path.startswith("."):
        raise ModelNotFoundError(f"there is no model directory {path}")
    raise ModelNotFoundError(_not_found(name_or_path, names))


def _not_found(name: str, names: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    suggestion = f" (did you mean {' or '.join(close)}?)" if close else ""
    return (
        f"no model '{name}'{suggestion}: it is no directory here, and the store {models_dir()} has "
        f"{', '.join(names) or 'no models yet'}; get it with `helios models pull {name}`, "
        f"or `helios models import` a directory or GGUF file"
    )


def write_origin(directory: Path, origin: Origin) -> None:
    """Note in a model directory where it came from."""
    (directory / ORIGIN_FILE).write_text(json.dumps(asdict(origin), indent=2) + "\n", encoding="utf-8")


def read_origin(directory: Path) -> Origin:
    """Where a model came from: what was noted, else what a link points to, else the directory itself."""
    if (directory / ORIGIN_FILE).is_file():
        noted = read_json(directory / ORIGIN_FILE)
        return Origin(source=str(noted.get("source", "")), licence=str(noted.get("licence", "")))
    return Origin(source=str(directory.resolve()))
