"""The Ray cluster: joining one, or starting one of our own on this machine that outlives the process that did.

Ours is bound to loopback, takes free ports and a temporary directory of its own, so it disturbs no other Ray here.
It asks for Ray's token (``~/.ray/auth_token``) unless RAY_AUTH_MODE says otherwise: without, every user of the machine
could run code in it.
"""

import contextlib
import fcntl
import importlib.util
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
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import ray
from ray._private import ray_constants
from ray._raylet import Config

from engine.checkpoint.store import home
from engine.errors import ConfigError

from .names import NAMESPACE

PACKAGES = ("engine", "router", "actors", "deploy", "cluster")
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
    pid: int
    created_s: float
    """The process's start time, since process ids are used again."""
    temp_dir: str

    @property
    def alive(self) -> bool:
        try:
            return abs(psutil.Process(self.pid).create_time() - self.created_s) < 1.0
        except psutil.NoSuchProcess:
            return False


def connect_ray(address: str | None = None) -> None:
    """Connect this process to a cluster; nothing is done if it is connected already.

    Without an address: RAY_ADDRESS, else the cluster we started on this machine. Raises ConfigError when there is none.
    """
    if ray.is_initialized():
        return
    local = local_ray()
    target = address or os.environ.get("RAY_ADDRESS") or (local.address if local else None)
    if target is None:
        raise ConfigError("no Ray cluster is known here; start one with `helios serve`, or pass address='host:port'")
    remedy = "start it with `helios serve`, or pass the address of a cluster that runs"
    if target != "auto" and "://" not in target and not _reachable(target):
        raise ConfigError(f"Ray is not reachable at {target}; {remedy}")
    if local is not None and target == local.address:
        _adopt_settings()
    try:
        ray.init(address=target, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"Ray is not reachable at {target} ({error}); {remedy}") from None


def local_ray() -> LocalRay | None:
    """The cluster we started on this machine; None if it does not run."""
    try:
        recorded = LocalRay(**json.loads(_record().read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return recorded if recorded.alive else None


def start_local_ray(num_cpus: int | None = None, dashboard: bool = False) -> LocalRay:
    """Our cluster on this machine, started if it does not run. Raises ConfigError with the log's end if it will not."""
    with _locked():
        running = local_ray()
        if running:
            return running
        temp_dir = Path(tempfile.mkdtemp(prefix="helios-ray-"))  # short: Ray puts sockets in it, limited to 107 bytes
        log = _record().with_name("ray.log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                _command(temp_dir, num_cpus, dashboard),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(),
            )
        address = _await_address(process, temp_dir, log)
        started = LocalRay(address, process.pid, psutil.Process(process.pid).create_time(), str(temp_dir))
        temporary = _record().with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(started)), encoding="utf-8")
        temporary.replace(_record())
        return started


def stop_local_ray() -> bool:
    """Stop the cluster that ``start_local_ray`` started, and no other; returns whether it ran."""
    with _locked():
        running = local_ray()
        if running is None:
            return False
        if ray.is_initialized() and ray.get_runtime_context().gcs_address == running.address:
            ray.shutdown()
        _end_tree(running.pid)
        shutil.rmtree(running.temp_dir, ignore_errors=True)
        _record().unlink()
        return True


def check_packages() -> None:
    """Make sure that our packages' rather common names are ours. Raises ConfigError naming the path that is not."""
    own = importlib.util.find_spec("helios")
    if own is None or own.origin is None:
        raise ConfigError("the module 'helios' cannot be found; install the package helios-llm")
    root = Path(own.origin).resolve().parent
    for name in PACKAGES:
        found = importlib.util.find_spec(name)
        places = list(found.submodule_search_locations or []) if found else []
        if not places:
            raise ConfigError(f"the package '{name}' of Helios is missing in {root}; install helios-llm again")
        if Path(places[0]).resolve() != root / name:
            raise ConfigError(
                f"the package '{name}' is {places[0]}, which is not Helios' own ({root / name}); "
                "remove that package or take its directory off the Python path"
            )


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


def _adopt_settings() -> None:
    """Have this process use loopback and the token, as our cluster does.

    Ray reads both settings when it is imported, and offers no other way to change them than the ones it uses itself.
    """
    os.environ[LOOPBACK] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")


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


def _await_address(process: "subprocess.Popen[bytes]", temp_dir: Path, log: Path) -> str:
    """The new cluster's address, when it answers. Ends the process and raises ConfigError if it does not come up."""
    deadline_s = time.monotonic() + START_S
    written = temp_dir / "ray_current_cluster"
    while time.monotonic() < deadline_s and process.poll() is None:
        if written.exists():
            address = written.read_text(encoding="utf-8").strip()
            if address and _reachable(address):
                return address
        time.sleep(0.05)
    _end_tree(process.pid)
    shutil.rmtree(temp_dir, ignore_errors=True)
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-10:])
    raise ConfigError(f"Ray did not start within {START_S:g} s; the end of {log}:\n{tail}")


def _end_tree(pid: int) -> None:
    """End a process and all it started. ``ray start --block`` ends its own on SIGTERM; what is left is killed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        tree = [*parent.children(recursive=True), parent]
        parent.terminate()
        _, left = psutil.wait_procs(tree, timeout=STOP_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"'{address}' is not the address of a Ray cluster; write it as host:port, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=PROBE_S).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _record() -> Path:
    directory = home() / "run"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / "ray.json"


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Two processes must not start or stop the cluster at the same time."""
    with _record().with_name("ray.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
