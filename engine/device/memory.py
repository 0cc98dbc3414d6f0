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
    return min(int(psutil.virtual_memory().available), _cgroup_available_bytes())


def _cgroup_available_bytes() -> int:
    """What the container's limit leaves, or a very large number without one."""
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            return int(Path(limit).read_text()) - int(Path(usage).read_text())
        except (OSError, ValueError):
            continue
    return 2**62
