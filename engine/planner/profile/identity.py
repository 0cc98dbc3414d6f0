"""What a profile is true of: the machine, its GPU, torch, and the file system that is offloaded to."""

import platform
from importlib.metadata import version
from pathlib import Path

import psutil

from ...checkpoint.store import home
from ..hardware import Hardware


def identity(device: str = "auto", offload_dir: Path | None = None) -> dict[str, str]:
    """Of this machine, for an engine on ``device`` that offloads to the directory; in words, to be compared and shown.

    ``offload_dir`` None is the engine's default.
    """
    from ...device import gpu_name, usable_cores  # torch, which whoever only plans does without
    from ...memory import total_bytes

    directory = offload_dir or default_offload_dir()
    return {
        "cpu": _cpu_name(),
        "cores": str(usable_cores()),
        "memory": f"{total_bytes() / 2**30:.0f} GiB",
        "device": device,
        "gpu": gpu_name(device) or "none",
        "torch": version("torch"),
        "offload_dir": str(directory),
        "file_system": _file_system(existing(directory)),
    }


def why_stale(hardware: Hardware) -> str | None:
    """Which of a profile's values this machine no longer has, as "name: old → new", and the remedy; None if it fits.

    None also for a file without an identity, which stands for a kind of machine.
    """
    was = hardware.identity
    if not was:
        return None
    directory = was.get("offload_dir")
    now = identity(was.get("device", "auto"), Path(directory) if directory else None)
    changed = [f"{name}: {was.get(name, 'unknown')} → {value}" for name, value in now.items() if was.get(name) != value]
    if not changed:
        return None
    return f"the profile '{hardware.name}' does not fit any more ({'; '.join(changed)}); measure with `helios profile`"


def default_offload_dir() -> Path:
    """Where an engine offloads to unless it is told."""
    return home() / "offload"


def existing(directory: Path) -> Path:
    """The directory, or the nearest above it that exists."""
    return next(folder for folder in (directory, *directory.absolute().parents) if folder.exists())


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _file_system(folder: Path) -> str:
    """The device and type of the file system that a folder is on."""
    path = folder.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    if not mounts:
        return "unknown"
    innermost = sorted(mounts, key=lambda mount: len(mount.mountpoint))[-1]  # of several at one place the last is seen
    return f"{innermost.device} ({innermost.fstype})"
