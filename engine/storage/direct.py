"""Files read in large aligned pieces past the page cache.

A model is visited in a cycle, so the page cache, which drops what was used longest ago, would keep nothing of it and
push out everything else; and direct I/O takes a third of the CPU time of ``read``. Where a file system has none the
pages are dropped after each read.
"""

import os
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..memory import page_aligned

ALIGN = 4096
"""Direct I/O wants offsets, lengths and addresses to be multiples of the disk's block; no disk has larger ones."""
PIECE_BYTES = 4 * 2**20
"""Bytes of one read: measured fastest here, with two to four in flight."""


class Bounce:
    """Aligned memory of one reader thread for what cannot be read in place."""

    def __init__(self) -> None:
        self.bytes = page_aligned((PIECE_BYTES + ALIGN,), torch.uint8)


class SourceFile:
    """A file open for reading that must not change while it is open. For use by several threads."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError if it cannot be opened."""
        self.path = path
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            try:
                self._fd, self.direct = os.open(path, flags | getattr(os, "O_DIRECT", 0)), hasattr(os, "O_DIRECT")
            except OSError:
                self._fd, self.direct = os.open(path, flags), False
            self._state = self._stat()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}; check the file and its rights") from None
        self._edges: dict[int, bytes] = {}

    def close(self) -> None:
        os.close(self._fd)

    def check(self) -> None:
        """Raise CheckpointError if the file was written to or cut since it was opened."""
        if self._stat() != self._state:
            raise CheckpointError(
                f"{self.path} was changed while the model was running; weights read since may be wrong. Load it again"
            )

    def read(self, offset: int, into: Tensor, bounce: Bounce) -> None:
        """Fill ``into`` (uint8 [n], host memory, n at most PIECE_BYTES) with the bytes from ``offset`` on.

        Without a copy where the address of ``into`` lies as far from an aligned one as ``offset`` does, but for the
        blocks at either end, which are kept from the first read on. Raises CheckpointError.
        """
        if not self.direct:
            self._read(offset, into, into.numel())
            self._drop(offset, into.numel())
            return
        end = offset + into.numel()
        first, last = -(-offset // ALIGN) * ALIGN, end // ALIGN * ALIGN  # the aligned part
        if first >= last or (into.data_ptr() - offset) % ALIGN:
            into.numpy()[:] = self.window(offset, into.numel(), bounce).numpy()
            return
        self._read(first, into[first - offset : last - offset], last - first)
        if first > offset:
            self._copy_edge(first - ALIGN, offset, into[: first - offset], bounce)
        if end > last:
            self._copy_edge(last, last, into[last - offset :], bounce)

    def window(self, offset: int, count: int, bounce: Bounce) -> Tensor:
        """The bytes [offset, offset + count) as a view of the bounce buffer, valid until its next use."""
        start = offset // ALIGN * ALIGN if self.direct else offset
        needed = offset - start + count
        self._read(start, bounce.bytes[: -(-needed // ALIGN) * ALIGN if self.direct else needed], needed)
        if not self.direct:
            self._drop(offset, count)
        return bounce.bytes[offset - start : needed]

    def _copy_edge(self, block: int, offset: int, into: Tensor, bounce: Bounce) -> None:
        """Fill ``into`` from within the block of ALIGN bytes at ``block``."""
        edge = self._edges.get(block)
        start, stop = offset - block, offset - block + into.numel()
        if edge is None or len(edge) < stop:
            self._read(block, bounce.bytes[:ALIGN], stop)
            edge = self._edges[block] = bounce.bytes[:stop].numpy().tobytes()
        into.numpy()[:] = memoryview(edge)[start:stop]

    def _read(self, offset: int, into: Tensor, needed: int) -> None:
        """Fill ``into``, or at least the bytes ``needed`` if the file ends there."""
        view, done = into.numpy().data, 0
        while done < needed:
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: reading at byte {offset + done} failed: {error.strerror}; check the disk"
                ) from None
            reached = done + count
            if self.direct and reached < needed:
                reached = reached // ALIGN * ALIGN  # where direct I/O can go on
            if reached <= done:
                raise CheckpointError(
                    f"{self.path} ends at byte {offset + done + count} inside a tensor; it was cut short after it was "
                    "opened. Get the model again"
                )
            done = reached

    def _drop(self, offset: int, count: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, count, os.POSIX_FADV_DONTNEED)

    def _stat(self) -> tuple[int, int, int]:
        status = os.fstat(self._fd)
        return status.st_ino, status.st_size, status.st_mtime_ns
