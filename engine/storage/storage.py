"""Files, memory and threads of the machine, as a device's engine uses them."""

import shutil
from pathlib import Path

from torch import Tensor

from .direct import SourceFile
from .spill import Spill, SpillFile, SpillMemory
from .transfer import WORKERS, Threads, Workers


class Storage:
    """This machine's own."""

    def source(self, path: Path) -> SourceFile:
        """A file of weights, open. Raises CheckpointError."""
        return SourceFile(path)

    def spill(self, directory: Path, n_bytes: int, unit_bytes: int) -> Spill:
        """Room on disk for bytes that come in multiples of ``unit_bytes``. Raises as SpillFile does."""
        return SpillFile(directory, n_bytes, unit_bytes)

    def memory(self, content: Tensor) -> Spill:
        """Host memory (uint8) as such room."""
        return SpillMemory(content)

    def workers(self, count: int = WORKERS) -> Workers:
        """So many that fill and store slots."""
        return Threads(count)

    def free_bytes(self, directory: Path) -> int:
        """What the file system of a directory, which may not exist yet, has left."""
        existing = next(folder for folder in (directory, *directory.parents) if folder.exists())
        return shutil.disk_usage(existing).free
