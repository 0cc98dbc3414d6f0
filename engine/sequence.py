"""A sequence: one request while it is being served."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum

from .kv import LayerLengths
from .kv_homes import KVHome
from .request import Deliver, Request, SamplingParams, Token, Usage
from .text.detokenizer import TextStream
from .text.stop import StopMatcher


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, KV and text of one request. Compared by identity."""

    request: Request
    params: SamplingParams
    """Those of the request with the seed drawn and ``max_tokens`` cut to the context."""
    deliver: Deliver
    kv: LayerLengths
    text: TextStream
    stop: StopMatcher
    tokens: list[int] = field(default_factory=list)
    """Prompt and output."""
    output: list[int] = field(default_factory=list)
    home: KVHome | None = None
    """Where its KV lives; None while it waits."""
    blocks: list[int] = field(default_factory=list)
    """Of its home's pool."""
    status: Status = Status.WAITING
    sum_depth: int = 0
    sum_confidence: float = 0.0
    breaches: int = 0
    stop_ids: frozenset[int] = frozenset()
    """Token ids that end it: end of sequence (unless ignored) and the request's own."""

    @classmethod
    def silent(cls, request_id: str, prompt: Seq[int], n_layers: int, max_tokens: int = 1) -> "Sequence":
        """One whose tokens nobody is told: for simulations, and for what only hidden states are wanted of."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        text = None  # nothing is said
        return cls(
            request=Request(request_id, tuple(prompt), params),
            params=params,
            deliver=lambda _: None,
            kv=LayerLengths(n_layers),
            text=text,  # type: ignore[arg-type]
            stop=StopMatcher(()),
            tokens=list(prompt),
        )

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def longest(self) -> int:
        """Positions it may reach."""
        return self.n_prompt + (self.params.max_tokens or 0)

    @property
    def usage(self) -> Usage:
        made = len(self.output) - len(self.request.generated)
        if not made:
            return Usage(self.n_prompt, len(self.output))
        depth, confidence = self.sum_depth / made, self.sum_confidence / made
        return Usage(self.n_prompt, len(self.output), depth, confidence, self.breaches)

    def append(self, token: Token) -> None:
        """Its next token."""
        self.tokens.append(token.id)
        self.output.append(token.id)
        self.sum_depth += token.depth
        self.sum_confidence += token.confidence
        self.breaches += token.breached
