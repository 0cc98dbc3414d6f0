"""What travels between actors and those who call them, beside the engine's own requests and deltas."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine.request import Delta


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model, as it introduces itself."""

    name: str
    replica: int
    epoch: int
    """When this life of the actor began, in nanoseconds since 1970."""
    fingerprint: str
    """Of the configuration it was started with."""
    architecture: str
    n_layers: int
    hidden_size: int
    vocab_size: int
    context: int
    """Longest sequence admitted, prompt and output together."""
    dtype: str
    device: str
    memory: dict[str, int]
    """Bytes held on the device, by use."""
    load_s: float
    pid: int
    node: str
    """Ray's id of the node it runs on."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A sequence was admitted. The first message of a stream; deltas follow."""

    request_id: str
    model: str
    replica: int
    epoch: int
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a model generates, found by letting it."""

    ok: bool
    latency_s: float
    reason: str


def by_request(deltas: Iterable[Delta]) -> tuple[Delta, ...]:
    """One delta for each request, in the order in which the requests first appear."""
    groups: dict[str, list[Delta]] = {}
    for delta in deltas:
        groups.setdefault(delta.request_id, []).append(delta)
    return tuple(_merged(group) for group in groups.values())


def _merged(deltas: list[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    return replace(deltas[-1], tokens=tokens, text="".join(delta.text for delta in deltas))
