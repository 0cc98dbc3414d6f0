"""HiGHS without the banner that it prints, past every option, when a process uses it for the first time."""

import ctypes
import functools
import os

import highspy


@functools.cache
def hush() -> None:
    """Let it print to nowhere, once: standard output belongs to whoever reads JSON from it."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        highspy.Highs()
        ctypes.CDLL(None).fflush(None)  # C's own buffer is empty before the descriptor is what it was
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
