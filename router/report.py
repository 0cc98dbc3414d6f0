"""What a replica tells the router: cumulative counters, so that a report repeated or lost changes nothing."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field


@dataclass(frozen=True, slots=True)
class Counters:
    """Sums since the replica started (its epoch), or, in the table, over all of a model's replicas and lives."""

    requests: int = 0
    """Finished requests; cancelled and failed ones do not count."""
    tokens: int = 0
    """Generated tokens."""
    ttft_s: float = 0.0
    """Sum over finished requests of the time to the first token."""
    decode_s: float = 0.0
    """Sum over finished requests of the time from the first token to the last."""
    decode_tokens: int = 0
    """Tokens of finished requests after each one's first."""
    sum_logprob: float = 0.0
    """Over generated tokens, from the raw logits."""
    sum_confidence: float = 0.0
    """Over generated tokens: the largest probability."""
    busy_s: float = 0.0
    """Time spent in sweeps."""

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(*(mine - theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def precedes(self, other: "Counters") -> bool:
        """Whether ``other`` can be a later reading of the same counters. Log-probabilities fall, the rest rises."""
        return self.requests <= other.requests and self.tokens <= other.tokens and self.busy_s <= other.busy_s


@dataclass(frozen=True, slots=True)
class Report:
    """One replica's state at one moment."""

    model: str
    replica: int
    epoch: int
    """When this life of the replica began, in nanoseconds since 1970: a restart has a larger one."""
    running: int
    waiting: int
    counters: Mapping[int, Counters] = field(default_factory=dict)
    """By depth: the number of layers the tokens went through."""
