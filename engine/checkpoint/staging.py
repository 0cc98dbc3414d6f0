"""A directory that appears whole or not at all."""

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import HeliosError


@contextmanager
def staged(directory: Path, replace: bool = False) -> Iterator[Path]:
    """Give a temporary sibling to fill; rename it to ``directory`` at the end, or remove it on an error or interrupt.

    A directory that is in the way is replaced on request, by two renames once the new one is complete. Raises
    HeliosError if it is in the way otherwise, and as ``temporary_sibling``.
    """
    if directory.exists() and not replace:
        raise HeliosError(f"{directory} is there already; remove it first, or ask for it to be replaced (--force)")
    with temporary_sibling(directory) as temporary:
        yield temporary
        _put_in_place(temporary, directory)


@contextmanager
def temporary_sibling(directory: Path) -> Iterator[Path]:
    """A new directory on the same disk as ``directory``, removed in the end.

    Raises HeliosError if the disk is full, or if the place cannot be written to.
    """
    temporary = hidden_sibling(directory)
    try:
        temporary.mkdir(parents=True)
        yield temporary
    except OSError as error:
        raise HeliosError(f"{directory} could not be written: {error.strerror or error}") from error
    finally:
        remove(temporary)


def hidden_sibling(directory: Path) -> Path:
    """A path beside ``directory`` that no listing shows and nothing else uses."""
    for number in itertools.count():
        path = directory.with_name(f".{directory.name}.{os.getpid()}-{number}.partial")
        if not path.exists():
            return path
    raise AssertionError("unreachable")


def remove(path: Path) -> None:
    """Remove a directory, or a link to one but not what it points to; a missing one is fine."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _put_in_place(temporary: Path, directory: Path) -> None:
    if not directory.exists() and not directory.is_symlink():
        temporary.rename(directory)
        return
    old = hidden_sibling(directory)
    directory.rename(old)
    temporary.rename(directory)
    remove(old)
