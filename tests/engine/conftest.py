"""Tiny models, saved once a session, and helpers that drive sweeps by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.tiny import save_tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``tiny_model(name)`` is the directory of that tiny random model of ``tests.engine.tiny.CONFIGS``."""
    saved: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in saved:
            saved[name] = save_tiny(tmp_path_factory.mktemp(name), name)
        return saved[name]

    return get
