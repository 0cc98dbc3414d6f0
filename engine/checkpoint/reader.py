"""Reading a tensor from a file into memory that the caller owns, for tools that go through a checkpoint once.

The bytes go from the page cache into the tensor by ``preadv``: no map, no copy in between. A tensor of another type
passes through a small staging buffer. (Weights of a running model are read by ``storage``.)
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import CheckpointError
from .index import TensorInfo

STAGING_BYTES = 8 * 2**20
READ_BYTES = 32 * 2**20
"""One system call reads so much at most: large enough for the disk, small enough for a cancellation to be noticed."""


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


@contextmanager
def _opened(info: TensorInfo) -> Iterator[int]:
    try:
        fd = os.open(info.file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(
            f"{info.file} cannot be opened: {error.strerror}; check the file and its rights"
        ) from None
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
                f"{info.file}: reading '{info.name}' at byte {offset + done} failed: {error.strerror}; check the disk"
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
