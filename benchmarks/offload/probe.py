"""What the machine gives within a limit: ``python -m benchmarks.offload.probe JOB`` measures disk and products.

Its own process in the contestant's control group, right before the contestant: rates of a shared disk change.
"""

import itertools
import threading
import time
from pathlib import Path

import torch

from benchmarks.limits import best_seconds
from benchmarks.offload.models import weights_files
from benchmarks.offload.ours import warm_up
from benchmarks.offload.protocol import Job, job_of_argument, own_bytes, say
from engine.device.cpu import CpuDevice
from engine.storage.direct import PIECE_BYTES, Bounce, SourceFile
from engine.storage.transfer import WORKERS

MATRICES_BYTES = 2**28
"""Weights multiplied in turn, so that they come from memory and not from a cache."""


def disk_rate(file: Path, seconds: float) -> float:
    """Bytes a second of WORKERS threads that read pieces of PIECE_BYTES past the page cache, one after another."""
    source = SourceFile(file)
    pieces = file.stat().st_size // PIECE_BYTES
    numbers = itertools.count()
    counts = [0] * WORKERS
    begun = time.perf_counter()

    def read(worker: int) -> None:
        bounce = Bounce()
        while time.perf_counter() - begun < seconds:
            source.window(next(numbers) % pieces * PIECE_BYTES, PIECE_BYTES, bounce)
            counts[worker] += PIECE_BYTES

    threads = [threading.Thread(target=read, args=(worker,)) for worker in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - begun
    source.close()
    return sum(counts) / taken


def product_rates(rows: list[int], width: int, out: int, n_bytes: int, threads: int) -> dict[int, float]:
    """Floating point operations a second of [rows, width] times bf16 weights [out, width], for each of ``rows``.

    The faster of plain weights and weights in oneDNN's own layout.
    """
    device = CpuDevice(torch.bfloat16, threads)
    plain = [torch.randn(out, width).bfloat16() for _ in range(max(2, n_bytes // (2 * out * width)))]
    rates: dict[int, float] = {}
    for packed in (False, True):
        for i in range(len(plain) if packed else 0):
            plain[i] = device.keep_matrix(plain[i])
        for count in rows:
            x = torch.randn(count, width).bfloat16()
            few = plain[: max(2, min(len(plain), 4096 // count))]
            seconds = best_seconds(lambda x=x, few=few: [device.linear(x, weight) for weight in few], 3)
            rates[count] = max(rates.get(count, 0.0), 2 * count * width * out * len(few) / seconds)
    return rates


def main() -> None:
    job: Job = job_of_argument()
    warm_up(job)
    base = own_bytes()
    disk = disk_rate(weights_files(Path(job.model))[0], job.options["seconds"])
    room = max(0, job.limit_bytes - base) // 4
    rates = product_rates(
        job.options["rows"], job.options["hidden"], job.options["mlp"], min(MATRICES_BYTES, room), job.threads
    )
    say("probe", base_bytes=base, disk_bytes_s=disk, product_flops_s=list(rates.items()))


if __name__ == "__main__":
    main()
