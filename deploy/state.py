"""What ``helios serve`` leaves for the other commands: where the app listens, and whether it started Ray for it."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from actors.config import AppConfig
from engine.checkpoint.store import home
from engine.errors import ConfigError
from engine.files import write_whole

DEFAULT_APP: str = AppConfig.model_fields["app"].default


@dataclass(frozen=True, slots=True)
class Address:
    """Where an app listens. ``port`` is a real one."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """For a client on this machine: a server on all interfaces is reached by loopback too."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Running:
    """An app that was started on this machine. It may have died since."""

    app: str
    host: str
    port: int
    pid: int | None
    """Of the ``helios serve`` that stays with it; None if it was detached."""

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)


def record_path(app: str) -> Path:
    return home() / "state" / app / "serve.json"


def write_record(record: Running) -> None:
    """Whole or not at all. Raises ConfigError if the state directory cannot be written."""
    write_whole(record_path(record.app), json.dumps(asdict(record)), "set HELIOS_HOME to a directory of yours")


def read_record(app: str) -> Running | None:
    """The record of an app, if there is one. Raises ConfigError for a file that is something else."""
    path = record_path(app)
    try:
        return Running(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; delete it") from None


def drop_record(app: str) -> None:
    record_path(app).unlink(missing_ok=True)


def running_url(app: str) -> str | None:
    """Where an app of this machine answers; None when it does not."""
    record = read_record(app)
    if record is None:
        return None
    try:
        httpx.get(record.address.url, timeout=5.0)
    except httpx.HTTPError:
        return None
    return record.address.url


def running_apps() -> list[Running]:
    """The apps that were started on this machine and answer, sorted by name. Unreadable records are passed over."""
    found = []
    for path in sorted((home() / "state").glob("*/serve.json")):
        with suppress(ConfigError):
            if running_url(path.parent.name) and (record := read_record(path.parent.name)):
                found.append(record)
    return found


def not_running(app: str) -> ConfigError:
    """That an app does not run here, with those that do."""
    others = ", ".join(record.app for record in running_apps())
    remedy = f"running: {others}; name one with --app" if others else "start one with `helios serve`"
    return ConfigError(f"no app '{app}' is running here; {remedy}")


def detached_address(config: AppConfig) -> Address | None:
    """Where a detached app of that name listens, if that is where ``config`` wants it: then it may be changed in place.

    An app with a ``helios serve`` of its own in the foreground belongs to that one.
    """
    record = read_record(config.app)
    if record is None or record.pid is not None or running_url(config.app) is None:
        return None
    wanted = config.http
    return record.address if record.host == wanted.host and wanted.port in (0, record.port) else None
