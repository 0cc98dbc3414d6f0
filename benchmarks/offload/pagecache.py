"""The page cache of a checkpoint: pages that are there already count against whoever read them, not a contestant."""

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path


def drop(files: Iterable[Path]) -> float:
    """Drop what the page cache holds of ``files``; returns the share of their pages that stayed nevertheless."""
    resident = total = 0
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            found, pages = _resident(fd, file.stat().st_size)
        finally:
            os.close(fd)
        resident, total = resident + found, total + pages
    return resident / max(1, total)


def _resident(fd: int, n_bytes: int) -> tuple[int, int]:
    """Pages of a file in the page cache, and pages of it."""
    pages = -(-n_bytes // mmap.PAGESIZE)
    if not pages:
        return 0, 0
    states = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = libc.mmap(None, n_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "the checkpoint could not be mapped")
    try:
        if libc.mincore(address, n_bytes, ctypes.byref(states)):
            raise OSError(ctypes.get_errno(), "what the page cache holds could not be asked for")
    finally:
        libc.munmap(address, n_bytes)
    return sum(state & 1 for state in states), pages
