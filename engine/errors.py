"""Errors a user can cause or must know about. Every message names the value, the limit and the remedy.

They take one message and, at most, keyword attributes set after construction, so that they survive
pickling between Ray processes (``Exception.__reduce__`` carries ``args`` and ``__dict__``).
"""


class HeliosError(Exception):
    """Base of every error this project raises on purpose; its text is fit to be shown to a user as it is."""


class InvalidRequestError(HeliosError):
    """A request that can never be served: a value of the wrong type or out of range, or a prompt too long.

    ``param`` is the name of the offending request field, if there is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ConfigError(HeliosError):
    """A configuration file, flag or environment that cannot be used."""


class ModelNotFoundError(HeliosError):
    """No model of that name is served, or no directory of that name is in the model store."""


class UnsupportedModelError(HeliosError):
    """A checkpoint uses an architecture or feature the engine does not implement; the message names it."""


class CheckpointError(HeliosError):
    """A checkpoint is missing, truncated, foreign, or has a tensor of the wrong shape or type."""


class OutOfMemoryError(HeliosError):
    """A tier has less left than was asked for. Raised before anything is half done."""


class OverloadedError(HeliosError):
    """The queue is full. ``retry_after_s`` is when it is worth trying again, in seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(HeliosError):
    """The engine stopped on an internal fault; what was running has ended with this as its reason."""


class CohortError(HeliosError):
    """The KV of some sequences cannot be read or written; ``blocks`` are their very block lists, ``reason`` is why.

    Raised within the engine, which ends those sequences with ``reason`` and goes on with the others.
    """

    def __init__(self, reason: HeliosError, blocks: list[list[int]]) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.blocks = blocks


def shown(value: object, most: int = 80) -> str:
    """A value for a message: in one line, and not long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def said(error: BaseException, most: int = 200) -> str:
    """What an error says, likewise."""
    text = " ".join((getattr(error, "strerror", None) or str(error) or type(error).__name__).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"
