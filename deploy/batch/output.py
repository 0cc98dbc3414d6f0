"""The output of a batch, which is also all that is known of its progress."""

import fcntl
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.errors import ConfigError

from .lines import Line

_CHUNK_BYTES = 1 << 20
MAX_RECORD_BYTES = 64 << 20
"""More than any record of a batch takes: a longer line is of a file that is something else."""


@dataclass(frozen=True, slots=True)
class Done:
    """What the output says of one input line."""

    input: str
    """Digest of what the record was made from."""
    failed: bool


class Output:
    """A file of records, one JSON object a line, that only grows. Use it as a context manager.

    Each record is one write, synced before ``append`` returns; so a crash tears at most the last line, which the next
    ``Output`` of the file drops. A lock keeps a second run from writing to the same file.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be written, is in use, or holds something else."""
        self.path = path
        try:
            # Not to wait for a pipe's other end, which would be for ever.
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            self._fd = os.open(path, flags, 0o644)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another output file") from None
        try:
            self._must_be_a_file()
            self._lock()
            self._drop_torn_line()
            self._done = self._read()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def done(self, line: Line, context: str) -> Done | None:
        """The record of an input line. Raises ConfigError if it was made from something else."""
        found = self._done.get(line.number)
        if found is not None and found.input != line.digest(context):
            raise ConfigError(
                f"{self.path} has a result for line {line.number} of another input, model or sampling defaults; "
                "resume with the same ones, or choose another output file"
            )
        return found

    def append(self, line: Line, context: str, record: dict[str, Any]) -> None:
        """Write the record of an input line, for good. Raises ConfigError if the disk does not take it."""
        full = {"line": line.number, "input": line.digest(context), **record}
        data = json.dumps(full, ensure_ascii=False).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}; make room and run again") from None

    def _must_be_a_file(self) -> None:
        """A resumed run reads it back, which a device or a pipe does not allow, or never ends."""
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise ConfigError(
                f"{self.path} is no regular file, and a run goes on from what its output holds; "
                "choose another output file"
            )

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{self.path} is being written by another run; wait for it or choose another") from None

    def _drop_torn_line(self) -> None:
        end = os.fstat(self._fd).st_size
        keep = end
        while keep:
            if end - keep > MAX_RECORD_BYTES:
                raise self._too_long()
            start = max(0, keep - _CHUNK_BYTES)
            newline = os.pread(self._fd, keep - start, start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < end:
            self._must_be_ours(keep, end)
            os.ftruncate(self._fd, keep)

    def _must_be_ours(self, start: int, end: int) -> None:
        """A torn record is a beginning of one; anything else is a file that was never ours to cut."""
        opening = b'{"line": '
        if not opening.startswith(os.pread(self._fd, min(end - start, len(opening)), start)):
            raise ConfigError(f"{self.path} ends in something that no batch wrote; choose another output file")

    def _read(self) -> dict[int, Done]:
        found: dict[int, Done] = {}
        with self.path.open("rb") as file:
            for row, raw in enumerate(iter(lambda: file.readline(MAX_RECORD_BYTES), b""), start=1):
                if len(raw) == MAX_RECORD_BYTES:
                    raise self._too_long()
                try:
                    record = json.loads(raw)
                    found[int(record["line"])] = Done(str(record["input"]), "error" in record)
                except (ValueError, KeyError, TypeError):
                    raise ConfigError(
                        f"{self.path}, line {row} is not a record of a batch; choose another output file"
                    ) from None
        return found

    def _too_long(self) -> ConfigError:
        limit = MAX_RECORD_BYTES >> 20
        return ConfigError(f"{self.path} has a line over {limit} MiB, which no batch wrote; choose another output file")
