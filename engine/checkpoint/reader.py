"""Reading tensors from files straight into memory that the caller owns.

The bytes go from the page cache into the tensor by ``preadv``, which holds no interpreter lock: no map, no copy in
between, and the memory is the caller's budgeted one. A tensor of another type passes through a small staging buffer.
One ``ReadJob`` is the unit of work, so whoever schedules reads (``read_many`` here, read-ahead of weights elsewhere)
needs only ``read_into`` and a buffer of STAGING_BYTES for each thread.
"""

import os
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..errors import CheckpointError
from .index import Checkpoint, TensorInfo
from .layout import FusedTensor, Naming

STAGING_BYTES = 8 * 2**20
READ_BYTES = 32 * 2**20
"""One system call reads so much at most: large enough for the disk, small enough for a cancellation to be noticed."""


class ReadJob(NamedTuple):
    """Fill ``out`` (contiguous, in host memory, of the tensor's shape) with the tensor at ``info``."""

    info: TensorInfo
    out: torch.Tensor


def plan_reads(
    checkpoint: Checkpoint, group: Iterable[FusedTensor], tensors: Mapping[str, torch.Tensor]
) -> list[ReadJob]:
    """What must be read to fill a group's ``tensors``, allocated by the caller in the layout's shapes.

    Plans of many groups may be joined for one ``read_many``. Raises CheckpointError for a tensor that the checkpoint
    lacks (``layout.check`` finds all of them beforehand).
    """
    naming = Naming.of(checkpoint.names)
    return [
        ReadJob(checkpoint.info(naming(part.source)), tensors[fused.name][part.row : part.row + part.shape[0]])
        for fused in group
        for part in fused.parts
    ]


def read_into(info: TensorInfo, out: torch.Tensor, staging: torch.Tensor | None = None) -> None:
    """Read one tensor into ``out``, converting to its type if that differs from the file's.

    ``staging`` is a uint8 buffer for the conversion, of at most STAGING_BYTES by custom; one is made if needed and not
    given. Raises CheckpointError if the file cannot be read or ends early, ValueError if ``out`` does not fit.
    """
    if out.shape != info.shape or not out.is_contiguous() or out.device.type != "cpu":
        raise ValueError(
            f"'{info.name}' has shape {list(info.shape)}; it cannot be read into a tensor of shape {list(out.shape)} "
            f"on {out.device}, {'contiguous' if out.is_contiguous() else 'not contiguous'}"
        )
    flat = out.detach().reshape(-1)
    with _opened(info) as fd:
        if out.dtype == info.dtype:
            _read_exactly(fd, info, info.offset, _bytes_of(flat))
        else:
            _read_converting(fd, info, flat, staging)


def read_many(
    jobs: Sequence[ReadJob],
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Run the jobs on a pool of threads. ``progress`` is called in this thread with the bytes each job has read.

    Raises the first error; the jobs not yet begun are dropped then, and none is running when this returns.
    """
    spare: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    if any(job.out.dtype != job.info.dtype for job in jobs):
        for _ in range(threads):
            spare.put(torch.empty(STAGING_BYTES, dtype=torch.uint8))

    def run(job: ReadJob) -> int:
        if job.out.dtype == job.info.dtype:
            read_into(job.info, job.out)
            return job.info.nbytes
        staging = spare.get()
        try:
            read_into(job.info, job.out, staging)
        finally:
            spare.put(staging)
        return job.info.nbytes

    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="helios-read") as pool:
        _drain(pool, [pool.submit(run, job) for job in jobs], progress)


def _drain(pool: ThreadPoolExecutor, futures: list[Future[int]], progress: Callable[[int], None] | None) -> None:
    try:
        for future in as_completed(futures):
            nbytes = future.result()
            if progress is not None:
                progress(nbytes)
    except BaseException:
        pool.shutdown(wait=True, cancel_futures=True)
        raise


@contextmanager
def _opened(info: TensorInfo) -> Iterator[int]:
    try:
        fd = os.open(info.file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{info.file} cannot be opened: {error.strerror}") from None
    try:
        yield fd
    finally:
        os.close(fd)


def _bytes_of(flat: torch.Tensor) -> memoryview:
    """A writable view of a contiguous one-dimensional tensor's memory."""
    return flat.view(torch.uint8).numpy().data


def _read_exactly(fd: int, info: TensorInfo, offset: int, into: memoryview) -> None:
    done = 0
    while done < len(into):
        try:
            count = os.preadv(fd, [into[done : done + READ_BYTES]], offset + done)
        except OSError as error:
            raise CheckpointError(
                f"{info.file}: reading '{info.name}' at byte {offset + done} failed: {error.strerror}"
            ) from None
        if count == 0:
            raise CheckpointError(
                f"{info.file} ends at byte {offset + done}, inside tensor '{info.name}', which needs "
                f"{info.offset + info.nbytes} bytes; the file was cut short after it was opened"
            )
        done += count


def _read_converting(fd: int, info: TensorInfo, flat: torch.Tensor, staging: torch.Tensor | None) -> None:
    if staging is None:
        staging = torch.empty(min(STAGING_BYTES, info.nbytes), dtype=torch.uint8)
    itemsize = info.dtype.itemsize
    step = staging.numel() // itemsize
    for start in range(0, flat.numel(), step):
        count = min(step, flat.numel() - start)
        chunk = staging[: count * itemsize]
        _read_exactly(fd, info, info.offset + start * itemsize, _bytes_of(chunk))
        flat[start : start + count].copy_(chunk.view(info.dtype))
