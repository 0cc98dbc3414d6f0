"""Whether a machine is quiet enough to be measured."""

import os
import time

import psutil

MOMENT_S = 0.5
QUIET_CORES = 0.2
"""What other processes may use: a system is never wholly idle."""


def others_busy() -> float:
    """Cores that other processes keep busy, of those that this one may use, over a moment in which it does nothing."""
    own = time.process_time()
    shares = psutil.cpu_percent(MOMENT_S, percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(shares))
    busy = sum(share for core, share in enumerate(shares) if core in usable) / 100
    return max(0.0, busy - (time.process_time() - own) / MOMENT_S)
