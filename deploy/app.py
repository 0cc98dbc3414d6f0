"""The Ray Serve application: ``serve run deploy.app:build config=CONFIG.yaml``, or ``helios serve``.

The replica adopts the app's detached actors when it starts and never owns them: it may be replaced while they work.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from actors.config import AppConfig, load_config
from actors.lifecycle import reconcile
from actors.session import Session
from engine.errors import ConfigError

from .http.api import build_api
from .http.service import Service

SPARE_REQUESTS = 100
"""Requests over ``http.max_queued`` that still reach the replica, which refuses them in the API's own words."""
START_ATTEMPTS = 3
DRAIN_S = 5.0
"""For the answers in flight when the app is stopped."""
QUIET = {"log_level": "WARNING", "enable_access_log": False}


class Ingress:
    """The HTTP replica. It holds nothing but the streams it is writing."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        checked = load_config(config)
        reconcile(checked)
        self._service = Service(checked, Session(checked.app))

    def __serve_build_asgi_app__(self) -> FastAPI:  # Serve asks for the ASGI application by this name
        return build_api(self._service)


def build(args: Mapping[str, Any]) -> Application:
    """The application of a Serve configuration's ``args``: ``config``, a file's path, or the file's own keys inline.

    Raises ConfigError.
    """
    if "config" not in args:
        return application(load_config(args))
    if len(args) > 1:
        others = ", ".join(sorted(set(args) - {"config"}))
        raise ConfigError(f"args have 'config' and also {others}; put everything into the file, or everything inline")
    return application(load_config(str(args["config"])))


def application(config: AppConfig) -> Application:
    """The application of a configuration that was read already."""
    limit = config.http.max_queued + SPARE_REQUESTS
    deployment = serve.deployment(
        serve.ingress()(Ingress),
        name="http",
        max_ongoing_requests=limit,
        max_queued_requests=limit,
        max_constructor_retry_count=START_ATTEMPTS,
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=0.1,
        ray_actor_options={"num_cpus": 0},
        logging_config=QUIET,
    )
    return deployment.bind(config.model_dump(mode="json"))
