"""Memory limits enforced from outside: a control group that counts a process's memory and its page cache together."""

import errno
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PREFIX = "helios-offload"


@dataclass(frozen=True, slots=True)
class Group:
    """One control group, of the first or the second version of the interface."""

    path: Path
    version: int

    @property
    def procs(self) -> Path:
        """A process id written here puts the process under the limit."""
        return self.path / "cgroup.procs"

    def limit(self, n_bytes: int) -> None:
        """Raises OSError where the kernel does not take the limit."""
        if self.version == 2:
            self.path.joinpath("memory.max").write_text(str(n_bytes))
            swap = self.path / "memory.swap.max"
            if swap.exists():
                swap.write_text("0")
            return
        self.path.joinpath("memory.limit_in_bytes").write_text(str(n_bytes))
        both = self.path / "memory.memsw.limit_in_bytes"
        if both.exists():  # memory and swap together: no swap
            both.write_text(str(n_bytes))

    def peak_bytes(self) -> int:
        """The most it ever held, page cache included; it reaches the limit as soon as files are read through that."""
        file = self.path / ("memory.peak" if self.version == 2 else "memory.max_usage_in_bytes")
        return int(file.read_text()) if file.exists() else 0

    def kills(self) -> int:
        """Processes the kernel ended because the limit left them no memory."""
        lines = (
            self.path.joinpath("memory.events" if self.version == 2 else "memory.oom_control").read_text().split("\n")
        )
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def held(self) -> dict[str, int]:
        """Bytes of the processes themselves ("anon") and of cached files ("file") now."""
        stat = dict(line.split() for line in self.path.joinpath("memory.stat").read_text().splitlines())
        names = {"anon": "anon", "file": "file"} if self.version == 2 else {"anon": "rss", "file": "cache"}
        return {name: int(stat[key]) for name, key in names.items()}

    def remove(self) -> None:
        """End what still runs in the group, and the group."""
        deadline = time.monotonic() + 20
        while self.path.exists() and time.monotonic() < deadline:
            for line in self.procs.read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(line), 9)
            try:
                self.path.rmdir()
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                time.sleep(0.1)


@contextmanager
def memory_group(n_bytes: int | None) -> Iterator[Group | None]:
    """A fresh group with a limit of ``n_bytes``, removed at the end with all its processes.

    None where there is no limit to set or no group can be made; ``why_not`` tells the reason.
    """
    group = _make(n_bytes)[0] if n_bytes else None
    try:
        yield group
    finally:
        if group is not None:
            group.remove()


def why_not() -> str | None:
    """Why no limit can be enforced here; None if it can be."""
    group, reason = _make(2**30)
    if group is not None:
        group.remove()
    return reason


def remove_stale() -> None:
    """Remove groups left by runs that were killed before they could."""
    for parent, version in _parents():
        for path in parent.glob(f"{PREFIX}-*-*"):
            if not Path(f"/proc/{path.name.split('-')[-2]}").exists():
                Group(path, version).remove()


def _make(n_bytes: int) -> tuple[Group | None, str | None]:
    tried = []
    for parent, version in _parents():
        group = Group(parent / f"{PREFIX}-{os.getpid()}-{secrets.token_hex(3)}", version)
        try:
            group.path.mkdir()
        except OSError as error:
            tried.append(f"{parent}: {error.strerror}")
            continue
        try:
            group.limit(n_bytes)
            return group, None
        except OSError as error:
            tried.append(f"{group.path}: {error.strerror}")
            group.remove()
    return None, "; ".join(tried) or f"no memory controller under {ROOT}"


def _parents() -> Iterator[tuple[Path, int]]:
    """Where a group may be made, this process's own group first, then those around it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines() if Path("/proc/self/cgroup").exists() else ():
        _, controllers, inside = line.split(":", 2)
        if controllers == "memory":
            root, version = ROOT / "memory", 1
        elif controllers == "" and (ROOT / "cgroup.controllers").exists():
            root, version = ROOT, 2
        else:
            continue
        own = root / inside.lstrip("/")
        while True:
            if own.is_dir():
                if version == 2 and "memory" not in (own / "cgroup.subtree_control").read_text().split():
                    _delegate(own)
                yield own, version
            if own == root:
                break
            own = own.parent


def _delegate(parent: Path) -> None:
    """Let the groups within ``parent`` have limits; not possible where processes are in ``parent`` itself."""
    with suppress(OSError):
        parent.joinpath("cgroup.subtree_control").write_text("+memory")
