"""What can be known to fail before anything is started: names, models' files, the port."""

import socket

from actors.config import AppConfig, HttpConfig
from actors.runtime import check_packages
from engine.checkpoint.index import Checkpoint
from engine.checkpoint.layout import check as check_layout
from engine.checkpoint.store import resolve
from engine.errors import ConfigError
from engine.spec import ModelSpec

from .state import Address


def check_app(config: AppConfig) -> None:
    """Read the headers of every model. Raises ConfigError, ModelNotFoundError, CheckpointError, UnsupportedModelError.

    With a cluster elsewhere the models are where their actors will be, so there is nothing to read here.
    """
    check_packages()
    if config.ray_address is not None:
        return
    for model in config.models:
        directory = resolve(model.path)
        check_layout(Checkpoint(directory), ModelSpec.from_directory(directory))


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
