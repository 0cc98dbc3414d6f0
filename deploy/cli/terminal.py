"""Tables on the terminal, and nothing beside them."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console


class Terminal(Console):
    """A console that leaves a broken pipe to ``HeliosGroup``, as every other output does."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


@contextmanager
def native_output_apart() -> Iterator[None]:
    """What libraries print past Python goes to standard error: standard output may be read by a program.

    HiGHS has lines in it that no option switches off.
    """
    sys.stdout.flush()
    libc = ctypes.CDLL(None)
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        libc.fflush(None)  # C's own buffer is empty before the descriptor is what it was
        os.dup2(kept, 1)
        os.close(kept)
