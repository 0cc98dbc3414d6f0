"""Bringing an app's actors in line with its configuration, and taking them down. Ray is connected already.

Actors are detached: they outlive the driver that made them, and the next one adopts those whose configuration is
the same. Models are loaded one after another, so that each sees what memory the ones before have left.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from engine.errors import ConfigError, HeliosError
from router.core import Served

from .config import AppConfig, ModelConfig
from .directory import actor_names
from .failures import ReplicaLostError, told_apart
from .messages import Health, ModelInfo
from .model import ModelActor
from .names import NAMESPACE, app_of, model_actor_name, parse_actor_name, router_actor_name
from .router import RouterActor

REPLY_S = 30.0
"""For calls that need no model."""
MAX_CONCURRENCY = 1000
"""Calls an actor has open at a time: each stream of a plain Ray caller is one."""
CLOSE_S = 2.0
"""For an actor to end when it has nothing left to do."""
ROUTER_SEES_S = 15.0
PLACE_S = 5.0
"""For a GPU to be free."""


@dataclass(frozen=True, slots=True)
class ReconcileReport:
    """What was done, by actor name, and the models that now run."""

    created: tuple[str, ...]
    adopted: tuple[str, ...]
    replaced: tuple[str, ...]
    stopped: tuple[str, ...]
    models: tuple[ModelInfo, ...]


def reconcile(config: AppConfig, wait_s: float = 600.0) -> ReconcileReport:
    """Make the app's actors those of ``config``: create, adopt, replace, stop; return when all models are ready.

    ``wait_s`` bounds the loading of each model. Raises the HeliosError of a model that cannot be loaded, and
    ConfigError when the cluster lacks what it needs, after removing what this call has created.
    """
    wanted = {model_actor_name(config.app, m.name, i): (m, i) for m in config.models for i in range(m.replicas)}
    router_name = router_actor_name(config.app)
    existing = set(actor_names(config.app)) - {router_name}
    stale = [name for name in sorted(existing & wanted.keys()) if not _same(name, wanted[name][0], wait_s)]
    stopped = sorted(existing - wanted.keys())
    _stop(stopped + stale, drain_s=0.0)
    created: list[str] = []
    try:
        if _ensure_router(router_name, config):
            created.append(router_name)
        models = []
        for name, (model, replica) in wanted.items():
            new = name not in existing or name in stale
            if new:
                created.append(name)
            models.append(_start_model(config.app, name, model, replica, new, wait_s))
    except BaseException:
        _stop(created, drain_s=0.0)
        raise
    _wait_for_router(router_name, len(wanted))
    return ReconcileReport(
        created=tuple(name for name in created if name not in stale),
        adopted=tuple(name for name in wanted if name in existing and name not in stale),
        replaced=tuple(stale),
        stopped=tuple(stopped),
        models=tuple(models),
    )


def stop_app(app: str) -> tuple[str, ...]:
    """Remove all actors of an app. Returns their names: none if it was not running."""
    names = actor_names(app)
    router = router_actor_name(app)
    _stop([name for name in names if name != router], drain_s=0.0)
    _stop([router], drain_s=0.0)
    return tuple(names)


def check_app(config: AppConfig, wait_s: float = 600.0) -> None:
    """Have every replica generate a token. Raises HeliosError with the reason of the first one that does not."""
    for model in config.models:
        for replica in range(model.replicas):
            name = model_actor_name(config.app, model.name, replica)
            try:
                handle = ray.get_actor(name, namespace=NAMESPACE)
                health: Health = ray.get(handle.check.remote(wait_s), timeout=wait_s + REPLY_S)
            except Exception as error:
                raise HeliosError(f"'{name}' does not generate: {told_apart(error)}") from None
            if not health.ok:
                raise HeliosError(f"'{name}' does not generate: {health.reason}")


def drain_app(app: str, drain_s: float) -> None:
    """Take on nothing more, and let the requests that were begun finish for up to ``drain_s`` seconds.

    Those that did not are told why. ``stop_app`` removes the actors, when whoever reads their streams is done.
    """
    names = actor_names(app)
    if (router := router_actor_name(app)) in names:
        with suppress(HeliosError, GetTimeoutError):
            _call(router, "close")
    _close_all([name for name in names if name != router], drain_s)


def list_apps() -> list[str]:
    """Names of the apps that have actors in this cluster."""
    return sorted({app for app in map(app_of, actor_names()) if app})


def _same(name: str, model: ModelConfig, wait_s: float) -> bool:
    """Whether the actor of that name runs this configuration and its model is loaded, or can be."""
    try:
        handle = ray.get_actor(name, namespace=NAMESPACE)
        if ray.get(handle.fingerprint.remote(), timeout=wait_s) != model.fingerprint():
            return False
        ray.get(handle.ready.remote(), timeout=wait_s)
    except Exception:  # gone, failed or stuck: in each case a new one is due
        return False
    return True


def _start_model(app: str, name: str, model: ModelConfig, replica: int, new: bool, wait_s: float) -> ModelInfo:
    gpus = _gpus(model)
    if new:
        _await_gpus(name, gpus, min(wait_s, PLACE_S))
    handle = (
        ray.remote(ModelActor)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,  # another driver may be starting the same app
            max_restarts=-1,
            max_task_retries=0,  # a stream is resumed by who began it, never run again from the start
            max_concurrency=MAX_CONCURRENCY,
            num_cpus=0,  # models of one machine share its cores
            num_gpus=gpus,
        )
        .remote(app, model, replica)
    )
    try:
        info: ModelInfo = ray.get(handle.ready.remote(), timeout=wait_s)
    except GetTimeoutError:
        raise HeliosError(
            f"'{name}' was not ready after {wait_s:g} s; see its log with `ray logs`, or wait longer"
        ) from None
    except Exception as error:
        raise told_apart(error) from None
    if info.fingerprint != model.fingerprint():
        raise ConfigError(f"'{name}' is being started with another configuration by another process; try again")
    return info


def _gpus(model: ModelConfig) -> float:
    """GPUs to reserve: as configured, else one for a model that will take CUDA."""
    if model.num_gpus is not None:
        return model.num_gpus
    if model.device == "auto":
        return 1.0 if ray.cluster_resources().get("GPU", 0) >= 1 else 0.0
    return 1.0 if model.device.startswith("cuda") else 0.0


def _await_gpus(name: str, gpus: float, wait_s: float) -> None:
    """Return when the cluster can give so many: Ray would let the actor wait for ever, without a word.

    Raises ConfigError after ``wait_s``, time for one that was just stopped to give its GPU back.
    """
    deadline_s = time.monotonic() + wait_s
    while gpus > (free := ray.available_resources().get("GPU", 0.0)):
        total = ray.cluster_resources().get("GPU", 0.0)
        if time.monotonic() >= deadline_s:
            if gpus > total:
                raise ConfigError(
                    f"'{name}' needs {gpus:g} GPU and the cluster has {total:g}; "
                    "add a node, or set device: cpu or num_gpus"
                )
            raise ConfigError(
                f"'{name}' needs {gpus:g} GPU and {free:g} of {total:g} are free; stop another model first"
            )
        time.sleep(0.1)


def _ensure_router(name: str, config: AppConfig) -> bool:
    """Have a router of this configuration; returns whether one was created.

    A changed router is replaced whole: its table is on disk and the replicas report to the new one by themselves.
    """
    served = tuple(Served(model.name, model.fingerprint(), model.replicas) for model in config.models)
    wanted = (served, config.router.objective)
    exists = name in actor_names(config.app)
    if exists:
        with suppress(ReplicaLostError, GetTimeoutError):
            if _call(name, "configuration") == wanted:
                return False
        _stop([name], drain_s=0.0)
    router = ray.remote(RouterActor).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=MAX_CONCURRENCY,
        num_cpus=0,
    )
    router.remote(config.app, *wanted)
    return not exists


def _wait_for_router(name: str, replicas: int) -> None:
    """Return when the router has heard from every replica, so that the first request is not refused."""
    deadline_s = time.monotonic() + ROUTER_SEES_S
    while time.monotonic() < deadline_s:
        states = [r.state for model in _call(name, "snapshot").models for r in model.replicas]
        if states.count("ready") == replicas:
            return
        time.sleep(0.05)
    raise HeliosError(f"the router '{name}' heard from {states.count('ready')} of {replicas} replicas: {states}")


def _stop(names: Sequence[str], drain_s: float) -> None:
    """Have actors end well, and kill what does not in time, such as a model that is still loading."""
    _close_all(names, drain_s)
    for name in names:
        with suppress(ValueError):  # gone already
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)


def _close_all(names: Sequence[str], drain_s: float) -> None:
    closing = [call for name in names if (call := _close(name, drain_s))]
    if closing:
        ray.wait(closing, num_returns=len(closing), timeout=drain_s + CLOSE_S)


def _close(name: str, drain_s: float) -> Any:
    """Ask a model to finish its requests, or a router to write its table. None when there is no such actor."""
    try:
        handle = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
    return handle.close.remote(drain_s) if parse_actor_name(name) else handle.flush.remote()


def _call(name: str, method: str) -> Any:
    """Call an actor by name. Raises ReplicaLostError, GetTimeoutError."""
    try:
        return ray.get(getattr(ray.get_actor(name, namespace=NAMESPACE), method).remote(), timeout=REPLY_S)
    except ValueError:
        raise ReplicaLostError(f"there is no actor '{name}'") from None
    except GetTimeoutError:
        raise
    except Exception as error:
        raise told_apart(error) from None
