"""The limits of this machine, measured in the same run as what is held against them."""

import time
from collections.abc import Callable

import torch


def best_seconds(work: Callable[[], object], repeats: int = 7) -> float:
    """Least wall time of one call, after a first one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def read_bandwidth(size_bytes: int = 2**29) -> float:
    """Bytes a second that all threads together read from memory, by summing an array far larger than the caches."""
    array = torch.ones(size_bytes // 4)
    return size_bytes / best_seconds(array.sum)


def product_rate(dtype: torch.dtype, size: int = 2048) -> float:
    """Floating point operations a second of a square matrix product."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / best_seconds(lambda: a @ b)
