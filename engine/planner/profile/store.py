"""Profiles in ``$HELIOS_HOME/hardware``, each under its machine's name, since several may share a home."""

import platform
import re
from pathlib import Path

from ...checkpoint.store import home
from ..hardware import Hardware

UNNAMED = "this-machine"


def machine_name() -> str:
    """The host's name, fit for a file."""
    return re.sub(r"[^\w.-]+", "-", platform.node()).strip("-.") or UNNAMED


def profile_path() -> Path:
    """Where this machine's profile is; it need not exist. Raises ConfigError for a HELIOS_HOME that is no place."""
    return home() / "hardware" / f"{machine_name()}.yaml"


def stored_profile() -> Hardware | None:
    """This machine's profile, None if it was never measured. Raises ConfigError if the file is damaged."""
    path = profile_path()
    return Hardware.load(path) if path.exists() else None
