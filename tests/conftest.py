"""Fixtures of the whole suite."""

import os
import signal
from pathlib import Path

# Before torch is imported: threads that spin while they wait take the cores from Ray's processes on a small machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from hypothesis import settings

settings.register_profile("same-every-time", derandomize=True, deadline=None)
settings.load_profile("same-every-time")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored

MODEL = "smollm2-135m-instruct"
STORE = Path(os.environ.get("HELIOS_HOME", "~/.cache/helios")).expanduser() / "models"
"""The user's own store, whatever HELIOS_HOME a test sets."""


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Directory of the default model in the model store; a test that asks for it is marked ``model``."""
    directory = STORE / MODEL
    if not (directory / "config.json").is_file():
        pytest.fail(f"{directory} holds no model; run `make model` or `helios models pull {MODEL}`")
    return directory
