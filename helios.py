"""Helios: serve language models on less hardware than they seem to need. The public Python names in one import.

Names are imported when they are first used, so ``import helios`` is quick and needs neither torch nor Ray.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.client import connect as connect
    from engine.config import EngineConfig as EngineConfig
    from engine.errors import ConfigError as ConfigError
    from engine.errors import HeliosError as HeliosError
    from engine.errors import InvalidRequestError as InvalidRequestError
    from engine.errors import ModelNotFoundError as ModelNotFoundError
    from engine.errors import OutOfMemoryError as OutOfMemoryError
    from engine.errors import OverloadedError as OverloadedError
    from engine.llm import LLM as LLM
    from engine.request import Completion as Completion
    from engine.request import Delta as Delta
    from engine.request import SamplingParams as SamplingParams

_HOME = {
    "LLM": "engine.llm",
    "SamplingParams": "engine.request",
    "Completion": "engine.request",
    "Delta": "engine.request",
    "EngineConfig": "engine.config",
    "connect": "actors.client",
    "HeliosError": "engine.errors",
    "ConfigError": "engine.errors",
    "InvalidRequestError": "engine.errors",
    "ModelNotFoundError": "engine.errors",
    "OutOfMemoryError": "engine.errors",
    "OverloadedError": "engine.errors",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("helios-llm")
    if name not in _HOME:
        raise AttributeError(f"helios has no '{name}'; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
