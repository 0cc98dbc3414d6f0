"""Tiny models, saved once a session, and engines that are closed when a test ends."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from tests.engine.tiny import save_tiny

AMPLE = 10**8


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``tiny_model(name)`` is the directory of that tiny random model of ``tests.engine.tiny.CONFIGS``."""
    saved: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in saved:
            saved[name] = save_tiny(tmp_path_factory.mktemp(name), name)
        return saved[name]

    return get


@pytest.fixture
def model(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a tiny model that a test may damage."""
    return shutil.copytree(tiny_model("llama"), tmp_path / "model")


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def get(model: Path, **fields: Any) -> Engine:
        settings = {"dtype": "float32", "threads": 1, "memory_bytes": AMPLE, "offload_dir": str(tmp_path / "offload")}
        made.append(Engine.load(EngineConfig(str(model), **settings | fields)))
        return made[-1]

    yield get
    for engine in made:
        engine.close()
