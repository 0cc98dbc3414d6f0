"""Host memory: page-aligned buffers, and how much of it there is."""

import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import psutil
import torch
from torch import Tensor

UNLIMITED = 2**62


def page_aligned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeroed memory of its own pages: direct I/O can fill it, and freeing it returns all of it to the system."""
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= 2 * mmap.PAGESIZE * 512 and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:size].view(dtype).view(tuple(shape))


def trim() -> None:
    """Give memory that was freed between blocks in use back to the system, where the allocator can (glibc)."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def _find_malloc_trim() -> Callable[[int], int] | None:
    try:
        return cast(Callable[[int], int], ctypes.CDLL(None).malloc_trim)
    except (AttributeError, OSError):
        return None


_malloc_trim = _find_malloc_trim()


def available_bytes() -> int:
    """What this process can still take, by the machine's memory and the container's limit."""
    return min(int(psutil.virtual_memory().available), _least_of_groups(_left))


def total_bytes() -> int:
    """The machine's memory, or the container's limit if that is less."""
    return min(int(psutil.virtual_memory().total), _least_of_groups(lambda folder, limit, _: _limit(folder, limit)))


def _least_of_groups(measure: Callable[[Path, str, str], int]) -> int:
    """The least that ``measure`` finds in this process's control group and those it is in; very much without one.

    It is called with the group's folder and the names of the files with the limit and the usage.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return UNLIMITED
    least = UNLIMITED
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, usage = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            least = min(least, measure(folder, limit, usage))
            if folder == root:
                break
    return least


def _left(folder: Path, limit: str, usage: str) -> int:
    """A group's limit less its usage; file pages that can be dropped are not counted as used."""
    try:
        left = int((folder / limit).read_text()) - int((folder / usage).read_text())
        for line in (folder / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name in ("inactive_file", "total_inactive_file"):
                return left + int(value)
    except (OSError, ValueError):
        return UNLIMITED
    return left


def _limit(folder: Path, limit: str) -> int:
    try:
        return int((folder / limit).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return UNLIMITED
