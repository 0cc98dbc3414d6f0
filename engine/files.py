"""Text files that are there whole or not at all."""

import os
from pathlib import Path
from tempfile import TemporaryFile

from .errors import ConfigError

REMEDY = "choose another file"


def check_target(path: Path, remedy: str = REMEDY) -> None:
    """Raises ConfigError, ending in ``remedy``, if a file of that name could not be written. Makes its directory."""
    try:
        if not path.name or (path.exists() and not path.is_file()):
            raise ConfigError(f"'{path}' is no file that could be written; {remedy}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; {remedy}") from None


def write_whole(path: Path, text: str, remedy: str = REMEDY) -> None:
    """Write ``text``, or leave what was there; a link is followed. Raises as ``check_target``."""
    check_target(path, remedy)
    target = path.resolve()
    temporary = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; {remedy}") from None
