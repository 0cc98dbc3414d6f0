"""Text files that are there whole or not at all."""

import os
from pathlib import Path

from .errors import ConfigError


def write_whole(path: Path, text: str, remedy: str = "choose another file") -> None:
    """Write ``text``, or leave what was there. Raises ConfigError, ending in ``remedy``, if it cannot be written."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; {remedy}") from None
