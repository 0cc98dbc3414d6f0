"""Where KV, activations and boundary states lie when they are not on the device: a private file, or host memory."""

import os
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from ..config import format_bytes
from ..errors import HeliosError, OutOfMemoryError
from .direct import ALIGN


class Spill(Protocol):
    """Bytes addressed by offset, for use by several threads on ranges that do not overlap."""

    def read(self, offset: int, into: Tensor) -> None:
        """Fill ``into`` (uint8, host memory)."""

    def write(self, offset: int, data: Tensor) -> None:
        """Store ``data`` (uint8, host memory)."""

    def close(self) -> None:
        """Give the space back."""


class SpillMemory:
    """Host memory taken from a tier."""

    def __init__(self, content: Tensor) -> None:
        self._content = content.numpy()

    def read(self, offset: int, into: Tensor) -> None:
        np.copyto(into.numpy(), self._content[offset : offset + into.numel()])

    def write(self, offset: int, data: Tensor) -> None:
        np.copyto(self._content[offset : offset + data.numel()], data.numpy())

    def close(self) -> None:
        return


class SpillFile:
    """A file without a name, of a fixed size: when the process ends, however it ends, the space is free again."""

    def __init__(self, directory: Path, n_bytes: int, unit_bytes: int) -> None:
        """Reads and writes are multiples of ``unit_bytes``; past the page cache if disk blocks divide that.

        Raises OutOfMemoryError if the disk has no room, HeliosError if the directory cannot be written to.
        """
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._fd, self.direct = _open_unnamed(directory, direct=unit_bytes % ALIGN == 0)
        except OSError as error:
            raise HeliosError(
                f"no file can be made in {directory}: {error.strerror}; choose another offload_dir"
            ) from None
        try:
            os.posix_fallocate(self._fd, 0, max(n_bytes, 1))
        except OSError as error:
            os.close(self._fd)
            free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
            raise OutOfMemoryError(
                f"{format_bytes(n_bytes)} were asked for on disk and {directory} has {format_bytes(free)} left "
                f"({error.strerror}); free space, lower kv_disk_tokens or choose another offload_dir"
            ) from None

    def read(self, offset: int, into: Tensor) -> None:
        self._transfer(os.preadv, "reading", offset, into)

    def write(self, offset: int, data: Tensor) -> None:
        self._transfer(os.pwritev, "writing", offset, data)

    def close(self) -> None:
        os.close(self._fd)

    def _transfer(self, call: "_Call", what: str, offset: int, data: Tensor) -> None:
        view, done = data.numpy().data, 0
        while done < len(view):
            try:
                count = call(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise HeliosError(
                    f"{what} {format_bytes(len(view))} of the offload file in {self.directory} failed: "
                    f"{error.strerror}; check the disk"
                ) from None
            if count == 0:
                raise HeliosError(f"{what} the offload file in {self.directory} stopped short at byte {offset + done}")
            done += count
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, len(view), os.POSIX_FADV_DONTNEED)


class _Call(Protocol):
    def __call__(self, fd: int, buffers: list[memoryview], offset: int, /) -> int: ...


def _open_unnamed(directory: Path, direct: bool) -> tuple[int, bool]:
    """A file descriptor of a file that no directory lists, and whether it bypasses the page cache."""
    flags = os.O_RDWR | os.O_CLOEXEC
    for extra in (getattr(os, "O_DIRECT", 0), 0) if direct else (0,):
        try:
            if hasattr(os, "O_TMPFILE"):
                return os.open(directory, flags | os.O_TMPFILE | extra, 0o600), bool(extra)
        except OSError:  # this file system lacks one of the two
            pass
        name = directory / f".helios-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            fd = os.open(name, flags | os.O_CREAT | os.O_EXCL | extra, 0o600)
        except OSError:
            if not extra:
                raise
            name.unlink(missing_ok=True)
            continue
        name.unlink()
        return fd, bool(extra)
    raise AssertionError("the loop returns or raises")


class BlockPiece:
    """A run of blocks on its way between a spill and a slot."""

    __slots__ = ("at", "n_bytes", "offset", "place", "store")

    def __init__(self, place: Spill, offset: int, at: int, n_bytes: int, store: bool) -> None:
        """``offset`` in the spill, ``at`` in the slot; ``store`` writes to the spill."""
        self.place, self.offset, self.at, self.n_bytes, self.store = place, offset, at, n_bytes, store

    def run(self, host: Tensor, bounce: object) -> None:
        part = host[self.at : self.at + self.n_bytes]
        if self.store:
            self.place.write(self.offset, part)
        else:
            self.place.read(self.offset, part)
