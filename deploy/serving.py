"""Starting an app over HTTP and stopping it: Ray, the actors, Serve, in this order and back."""

import logging
import os
import time
from dataclasses import dataclass

import ray
from ray import serve
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client, _set_global_client

from actors.config import AppConfig
from actors.lifecycle import ReconcileReport, check_app, drain_app, list_apps, reconcile, stop_app
from actors.local_ray import local_ray, start_local_ray, stop_local_ray
from actors.runtime import connect_ray
from engine.errors import ConfigError, HeliosError

from .app import DRAIN_S, QUIET, application
from .preflight import is_elsewhere, only_one
from .state import Address, Running, drop_record, write_record

__all__ = ["DRAIN_S", "Started", "must_be_alive", "start", "stop"]
KEEP_ALIVE_S = 75
"""Longer than the 60 s after which common load balancers give up an idle connection, so that they do it and not we."""
SERVE_ENDS_S = 30.0


@dataclass(frozen=True, slots=True)
class Started:
    """An app that answers."""

    record: Running
    report: ReconcileReport


def start(config: AppConfig, address: Address, detached: bool) -> Started:
    """Have the app of ``config`` answer at ``address``; its actors are adopted where they already run.

    Raises HeliosError. If the app did not run before, a failure leaves nothing behind; one that did goes on.
    """
    _quieten()
    ours = not is_elsewhere(config)
    started_ray, fresh = ours and local_ray() is None, False
    try:
        connect_ray(start_local_ray().address if ours else config.ray_address)
        fresh = config.app not in list_apps()
        _check_serve(config.app, address)
        report = reconcile(config)
        check_app(config)
        _ensure_serve(address)
        serve.run(application(config), name=config.app, route_prefix="/", blocking=False, logging_config=QUIET)
        record = Running(config.app, address.host, address.port, None if detached else os.getpid())
        write_record(record)
    except BaseException:
        if fresh:
            stop(config.app, config.ray_address)
        elif started_ray:
            stop_local_ray()
        raise
    return Started(record, report)


def stop(app: str, ray_address: str | None = None, drain_s: float = 0.0) -> tuple[str, ...]:
    """Stop an app, and Serve and our own Ray if no other app is left on them. Returns what was stopped, in words.

    Raises ConfigError if a cluster that was named cannot be reached.
    """
    _quieten()
    if ray_address is None and "RAY_ADDRESS" not in os.environ and local_ray() is None:
        drop_record(app)
        return ("a Ray that did not answer",) if stop_local_ray() else ()
    connect_ray(ray_address)
    stopped = []
    drain_app(app, drain_s)  # while the streams can still be told
    drop_record(app)
    if _serve_runs() and app in serve.status().applications:
        serve.delete(app)
        stopped.append(f"the HTTP service of '{app}'")
    stopped += [f"actor {name}" for name in stop_app(app)]
    if _serve_runs() and not serve.status().applications:
        # Before Ray, which otherwise waits for Serve's processes to give up.
        _shut_serve_down()
    ours = local_ray()
    if ours is not None and ray.get_runtime_context().gcs_address == ours.address and not list_apps():
        ray.shutdown()
        stop_local_ray()
        stopped.append(f"Ray at {ours.address}")
    return tuple(stopped)


def must_be_alive(config: AppConfig) -> None:
    """Raises HeliosError when the Ray under the app has ended."""
    if config.ray_address is None and "RAY_ADDRESS" not in os.environ and local_ray() is None:
        raise HeliosError("Ray has ended, and the app with it; its log is in HELIOS_HOME/run. Start the app again")


def _check_serve(app: str, address: Address) -> None:
    """Raises ConfigError, before any model is loaded, if Serve is in use: its address is fixed when it starts."""
    if not _serve_runs():
        return
    runs = _get_global_client().http_config
    where = Address(runs.host, runs.port)
    for other in sorted(serve.status().applications):
        if other != app:
            raise ConfigError(only_one(other, where.url, app))
    if where != address:
        raise ConfigError(
            f"Ray Serve listens at {runs.host}:{runs.port} on this cluster already and not at "
            f"{address.host}:{address.port}; use that address, or `helios stop --app {app}` first"
        )


def _ensure_serve(address: Address) -> None:
    if not _serve_runs():
        options = HTTPOptions(host=address.host, port=address.port, keep_alive_timeout_s=KEEP_ALIVE_S)
        serve.start(proxy_location="HeadOnly", http_options=options, logging_config=QUIET)


def _shut_serve_down() -> None:
    """As ``serve.shutdown``, which has Ray print that its last call failed: the controller never answers it."""
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    ray.get(controller.graceful_shutdown.remote(wait=False), timeout=SERVE_ENDS_S)
    deadline_s = time.monotonic() + SERVE_ENDS_S
    while time.monotonic() < deadline_s and _is_named(SERVE_CONTROLLER_NAME):
        time.sleep(0.05)
    _set_global_client(None)


def _is_named(actor: str) -> bool:
    return any(named["name"] == actor for named in ray.util.list_named_actors(all_namespaces=True))


def _serve_runs() -> bool:
    # Serve has no public question for this that does not start it.
    return _get_global_client(raise_if_no_controller_running=False) is not None


def _quieten() -> None:
    """Serve tells of each step; the command line says what matters in its own words."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
