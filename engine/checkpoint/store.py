"""The model store: ordinary Hugging Face directories under ``HELIOS_HOME``/models. Nothing is downloaded here."""

import difflib
import os
from pathlib import Path

from ..errors import ModelNotFoundError

DEFAULT_MODEL = "smollm2-135m-instruct"


def home() -> Path:
    """Where this project keeps models and state: ``HELIOS_HOME``, else ``~/.cache/helios``."""
    return Path(os.environ.get("HELIOS_HOME") or "~/.cache/helios").expanduser()


def models_dir() -> Path:
    return home() / "models"


def list_models() -> list[str]:
    """Names of the models in the store, sorted."""
    if not models_dir().is_dir():
        return []
    return sorted(entry.name for entry in models_dir().iterdir() if (entry / "config.json").is_file())


def resolve(model: str) -> Path:
    """The directory of a model given by path or by its name in the store.

    Raises ModelNotFoundError that says where was looked, what there is and how to get a model.
    """
    path = Path(model).expanduser()
    if path.is_dir() and ("/" in model or not (models_dir() / model).is_dir()):
        return path
    if "/" not in model and (models_dir() / model / "config.json").is_file():
        return models_dir() / model
    if model.startswith(("/", ".", "~")):
        raise ModelNotFoundError(f"there is no directory {path}; give a Hugging Face model directory")
    names = list_models()
    close = difflib.get_close_matches(model, names, n=1)
    there = f"; did you mean '{close[0]}'?" if close else f"; it has {', '.join(names)}" if names else "; it is empty"
    raise ModelNotFoundError(
        f"no model '{model}' in {models_dir()}{there}. Get one with `helios models pull {model}` or "
        f"`helios models import PATH`"
    )
