"""Starting an app over HTTP and stopping it: Ray, the actors, Serve, in this order and back."""

import logging
import os
from dataclasses import dataclass

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client

from actors.config import AppConfig
from actors.lifecycle import ReconcileReport, list_apps, reconcile, stop_app
from actors.local_ray import local_ray, start_local_ray, stop_local_ray
from actors.runtime import connect_ray
from engine.errors import ConfigError, HeliosError

from .app import DRAIN_S, QUIET, application
from .state import Address, Running, drop_record, write_record

__all__ = ["DRAIN_S", "Started", "must_be_alive", "start", "stop"]
KEEP_ALIVE_S = 75
"""Longer than the 60 s after which common load balancers give up an idle connection, so that they do it and not we."""


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
    ours = config.ray_address is None and "RAY_ADDRESS" not in os.environ
    started_ray, fresh = ours and local_ray() is None, False
    try:
        connect_ray(start_local_ray().address if ours else config.ray_address)
        fresh = config.app not in list_apps()
        report = reconcile(config)
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
    drop_record(app)
    if ray_address is None and "RAY_ADDRESS" not in os.environ and local_ray() is None:
        return ()
    connect_ray(ray_address)
    stopped = []
    if _serve_runs() and app in serve.status().applications:
        serve.delete(app)
        stopped.append(f"the HTTP service of '{app}'")
    stopped += [f"actor {name}" for name in stop_app(app, drain_s)]
    if _serve_runs() and not serve.status().applications:
        # Before Ray, which otherwise waits for Serve's processes to give up.
        serve.shutdown()
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


def _ensure_serve(address: Address) -> None:
    """Serve listening at ``address``. Raises ConfigError if it runs elsewhere: its address is fixed when it starts."""
    if _serve_runs():
        runs = _get_global_client().http_config
        if (runs.host, runs.port) != (address.host, address.port):
            raise ConfigError(
                f"Ray Serve listens at {runs.host}:{runs.port} on this cluster already and not at "
                f"{address.host}:{address.port}; use that address, or `helios stop` first"
            )
        return
    options = HTTPOptions(host=address.host, port=address.port, keep_alive_timeout_s=KEEP_ALIVE_S)
    serve.start(proxy_location="HeadOnly", http_options=options, logging_config=QUIET)


def _serve_runs() -> bool:
    # Serve has no public question for this that does not start it.
    return _get_global_client(raise_if_no_controller_running=False) is not None


def _quieten() -> None:
    """Serve tells of each step; the command line says what matters in its own words."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
