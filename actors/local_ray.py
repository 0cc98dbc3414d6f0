"""A Ray of our own on this machine, which outlives the process that starts it.

It is bound to loopback, takes free ports and a temporary directory of its own, so it disturbs no other Ray here.
It asks for Ray's token (``~/.ray/auth_token``) unless RAY_AUTH_MODE says otherwise: without, every user of the machine
could run code in it.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import ray

from engine.checkpoint.store import make_home
from engine.errors import ConfigError
from engine.files import write_whole

from .signals import interrupts_later

OBJECT_STORE_BYTES = 256 * 2**20
"""Tokens and counters are all that goes through it."""
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0, Ray forms no cluster across machines and listens on loopback alone, as it does on Windows and macOS."""
START_S = 60.0
STOP_S = 5.0
"""For Ray to end by itself; it waits longer for detached actors, which nobody needs once their cluster goes."""
PROBE_S = 3.0


@dataclass(frozen=True, slots=True)
class LocalRay:
    """The cluster we started on this machine, as recorded in HELIOS_HOME/run/ray.json."""

    address: str
    """Empty while it starts."""
    pid: int
    created_s: float
    """The process's start time, since process ids are used again."""
    temp_dir: str

    @property
    def alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.created_s) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def local_ray() -> LocalRay | None:
    """The cluster we started on this machine; None if it does not run, or not yet."""
    recorded = _recorded()
    return recorded if recorded and recorded.address and recorded.alive else None


def start_local_ray(num_cpus: int | None = None, dashboard: bool = False) -> LocalRay:
    """Our cluster on this machine, started if it does not run. Raises ConfigError with the log's end if it will not.

    Whatever interrupts it, what was started is ended, or at least recorded, so that ``stop_local_ray`` finds it.
    """
    with _locked():
        running = local_ray()
        if running and reachable(running.address):
            return running
        _remove_recorded()  # what somebody who was killed has left
        try:
            log = _record().with_name("ray.log")
            started = _spawn(log, num_cpus, dashboard)
            started = replace(started, address=_await_address(started, log))
            _write(started)
        except BaseException:
            _remove_recorded()
            raise
        return started


def stop_local_ray() -> bool:
    """Stop the cluster that ``start_local_ray`` started, and no other; returns whether any of it ran."""
    with _locked():
        running = local_ray()
        if running and ray.is_initialized() and ray.get_runtime_context().gcs_address == running.address:
            ray.shutdown()
        return _remove_recorded()


def reachable(address: str) -> bool:
    """Whether something listens at host:port. Raises ConfigError for what is no such address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"'{address}' is not the address of a Ray cluster; write it as host:port, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=PROBE_S).close()
    except OSError:
        return False
    return True


def _spawn(log: Path, num_cpus: int | None, dashboard: bool) -> LocalRay:
    """Start Ray and record it at once, so that it is found even if this process is killed."""
    with log.open("wb") as output, interrupts_later():
        temp_dir = Path(tempfile.mkdtemp(prefix="helios-ray-"))  # short: Ray's sockets in it have 107 bytes at most
        process = subprocess.Popen(
            _command(temp_dir, num_cpus, dashboard),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(),
        )
        started = LocalRay("", process.pid, psutil.Process(process.pid).create_time(), str(temp_dir))
        _write(started)
    return started


def _command(temp_dir: Path, num_cpus: int | None, dashboard: bool) -> list[str]:
    options = {
        "node-ip-address": "127.0.0.1",
        "port": 0,
        "ray-client-server-port": _free_port(),
        "dashboard-agent-listen-port": 0,
        "min-worker-port": 0,
        "max-worker-port": 0,
        "temp-dir": temp_dir,
        "object-store-memory": OBJECT_STORE_BYTES,
        "include-dashboard": dashboard,
    }
    if num_cpus is not None:
        options["num-cpus"] = num_cpus
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *flags]


def _environment() -> dict[str, str]:
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", LOOPBACK: "0"}
    env.setdefault("RAY_AUTH_MODE", "token")
    if env["RAY_AUTH_MODE"] == "token" and not (env.get("RAY_AUTH_TOKEN") or env.get("RAY_AUTH_TOKEN_PATH")):
        token = Path.home() / ".ray" / "auth_token"
        if not token.exists():
            token.parent.mkdir(parents=True, exist_ok=True)
            token.touch(mode=0o600)
            token.write_text(secrets.token_hex(32), encoding="ascii")
    return env


def _await_address(started: LocalRay, log: Path) -> str:
    """The new cluster's address, when it answers. Raises ConfigError if it does not come up."""
    deadline_s = time.monotonic() + START_S
    written = Path(started.temp_dir) / "ray_current_cluster"
    while time.monotonic() < deadline_s and started.alive:
        if written.exists():
            address = written.read_text(encoding="utf-8").strip()
            if address and reachable(address):
                return address
        time.sleep(0.05)
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-10:])
    raise ConfigError(f"Ray did not start within {START_S:g} s; the end of {log}:\n{tail}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _record() -> Path:
    """Raises ConfigError if there is no place for it."""
    directory = make_home() / "run"
    try:
        directory.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be made: {error.strerror}; set HELIOS_HOME to a directory of yours"
        ) from None
    return directory / "ray.json"


def _recorded() -> LocalRay | None:
    """What was started last and not stopped since. It may be half started, or dead."""
    try:
        return LocalRay(**json.loads(_record().read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _write(cluster: LocalRay) -> None:
    write_whole(_record(), json.dumps(asdict(cluster)), "set HELIOS_HOME to a directory of yours")


def _remove_recorded() -> bool:
    """End what is recorded, and forget it; returns whether any of it ran."""
    recorded = _recorded()
    if recorded is None:
        return False
    ran = _end(recorded)
    shutil.rmtree(recorded.temp_dir, ignore_errors=True)
    _record().unlink(missing_ok=True)
    return ran


def _end(cluster: LocalRay) -> bool:
    """End a cluster's processes; returns whether there were any.

    ``ray start --block`` ends its own on SIGTERM; what is left is killed.
    """
    running = _processes(cluster)
    left = running
    if cluster.alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(cluster.pid).terminate()
        _, left = psutil.wait_procs(running, timeout=STOP_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=STOP_S)
    return bool(running)


def _processes(cluster: LocalRay) -> list[psutil.Process]:
    """What runs of a cluster: all of it is in the session of the process that was started."""
    session = [process for process in psutil.process_iter() if _session(process) == cluster.pid]
    return session if cluster.alive or any(_names(process, cluster.temp_dir) for process in session) else []


def _session(process: psutil.Process) -> int | None:
    with contextlib.suppress(OSError):
        return os.getsid(process.pid)
    return None


def _names(process: psutil.Process, directory: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(directory in word for word in process.cmdline())
    return False


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Two processes must not start or stop the cluster at the same time."""
    with _record().with_name("ray.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
