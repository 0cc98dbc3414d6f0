"""The Ray cluster an app runs on: joining it, and making sure that the packages it will import are ours."""

import importlib.util
import os
from pathlib import Path

import grpc
import ray
from ray._private import ray_constants
from ray._raylet import Config

from engine.errors import ConfigError

from .local_ray import LOOPBACK, PROBE_S, local_ray, reachable
from .names import NAMESPACE
from .signals import own_sigterm

_NOT_RAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNIMPLEMENTED)
PACKAGES = ("engine", "router", "actors", "deploy", "cluster")


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
    if target != "auto" and "://" not in target and not (reachable(target) and _is_ray(target)):
        raise ConfigError(f"Ray is not reachable at {target}; {remedy}")
    if local is not None and target == local.address:
        _adopt_settings()
    try:
        ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True  # it prints C++'s stack and aborts on SIGTERM
        with own_sigterm():
            ray.init(address=target, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"Ray is not reachable at {target} ({error}); {remedy}") from None


def _is_ray(address: str) -> bool:
    """Whether a Ray answers there, and not a proxy or another program, which Ray itself takes half a minute to see."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return True  # this would need its certificates
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
        try:
            ask(b"", timeout=PROBE_S)
        except grpc.RpcError as error:  # one that asks for a token is a Ray too
            return error.code() not in _NOT_RAY
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


def _adopt_settings() -> None:
    """Have this process use loopback and the token, as our cluster does.

    Ray reads both settings when it is imported, and offers no other way to change them than the ones it uses itself.
    """
    os.environ[LOOPBACK] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")
