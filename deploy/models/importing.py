"""Importing a model from this machine: a GGUF file is converted, a Hugging Face directory linked or copied."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from engine.checkpoint.staging import remove, staged
from engine.checkpoint.store import Origin, models_dir, write_origin
from engine.errors import HeliosError
from engine.spec import ModelSpec

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
COPIED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "LICENSE*")


def import_model(
    path: Path,
    name: str,
    copy: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Bring a model into the store under ``name`` and return its place there.

    A directory is linked, so that its weights are not on the disk twice; a copy survives its removal. Raises
    HeliosError for a bad or taken name, CheckpointError or UnsupportedModelError for a model the engine could not run.
    """
    check_name(name)
    target = models_dir() / name
    if target.exists() and not force:
        raise HeliosError(f"the store has a model '{name}' already ({target}); choose another --name, or use --force")
    path = path.expanduser().resolve()
    if path.is_dir():
        _import_directory(path, target, copy, force)
    elif path.is_file():
        from engine.checkpoint.gguf import import_gguf

        import_gguf(path, target, progress=progress, replace=force)
    else:
        raise HeliosError(f"{path} does not exist; give a GGUF file or a Hugging Face directory")
    return target


def check_name(name: str) -> None:
    """Raises HeliosError unless the store can have a model of this name."""
    if not NAME.fullmatch(name):
        raise HeliosError(f"'{name}' cannot name a model; use letters, digits, '.', '_' and '-', such as my-model-1b")


def _import_directory(path: Path, target: Path, copy: bool, force: bool) -> None:
    from engine.checkpoint.index import Checkpoint
    from engine.quant.stored import check_model

    check_model(Checkpoint(path), ModelSpec.from_directory(path))
    if target.resolve() == path and not target.is_symlink():
        raise HeliosError(f"{path} is the store's own '{target.name}'; there is nothing to import")
    if copy:
        with staged(target, replace=force) as temporary:
            for file in sorted({file for pattern in COPIED for file in path.glob(pattern) if file.is_file()}):
                shutil.copyfile(file, temporary / file.name)
            write_origin(temporary, Origin(str(path)))
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    remove(target)
    os.symlink(path, target, target_is_directory=True)
