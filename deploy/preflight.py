"""What can be known to fail before anything is started: names, models' files, the port."""

import os
import socket

import torch

from actors.config import AppConfig, HttpConfig, ModelConfig
from actors.runtime import check_packages
from engine.checkpoint.index import Checkpoint
from engine.checkpoint.layout import check as check_layout
from engine.checkpoint.store import resolve
from engine.device import open_device
from engine.errors import ConfigError
from engine.spec import ModelSpec

from .state import Address, running_apps


def check_app(config: AppConfig) -> None:
    """Read the headers of every model. Raises ConfigError, ModelNotFoundError, CheckpointError, UnsupportedModelError.

    With a cluster elsewhere the models are where their actors will be, so there is nothing to read here.
    """
    check_packages()
    if is_elsewhere(config):
        return
    _must_be_alone(config.app)
    for model in config.models:
        directory = resolve(model.path)
        check_layout(Checkpoint(directory), ModelSpec.from_directory(directory))
        _check_device(model)


def is_elsewhere(config: AppConfig) -> bool:
    """Whether the app runs on a cluster that is named, and not on the Ray that Helios starts on this machine."""
    return config.ray_address is not None or "RAY_ADDRESS" in os.environ


def _must_be_alone(app: str) -> None:
    for other in running_apps():
        if other.app != app:
            raise ConfigError(only_one(other.app, other.address.url, app))


def only_one(runs: str, where: str, wanted: str) -> str:
    """Ray Serve has one address on a cluster, so `helios serve` puts one app on it."""
    return (
        f"the app '{runs}' is served at {where}, and a Ray serves one app; stop it with `helios stop --app {runs}`, "
        f"put its models into the configuration of '{wanted}', or set HELIOS_HOME to another directory for a second Ray"
    )


def _check_device(model: ModelConfig) -> None:
    """What this machine lacks. Where there is CUDA it is not touched here: Ray hands it out."""
    if model.device.startswith("cuda") and not torch.cuda.is_available():
        open_device(model.engine_config())


def claim_address(http: HttpConfig) -> Address:
    """The address of ``http``, with a free port in the place of 0. Raises ConfigError if it cannot be listened on."""
    try:
        # As the server will bind it: a port whose last owner has just gone is free.
        with socket.create_server((http.host, http.port), family=_family(http.host)) as probe:
            return Address(http.host, probe.getsockname()[1])
    except OSError as error:
        raise ConfigError(
            f"{http.host}:{http.port} cannot be listened on: {error.strerror or error}; "
            "choose another with --port or http.port, or stop what listens there (`helios stop` if it is Helios)"
        ) from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
