"""What goes into the engine and what comes out of it: sampling parameters, requests, tokens, deltas."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from .errors import HeliosError

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. Field names and meanings are those of the OpenAI and vLLM APIs.

    ``engine.sampling.validate`` checks a value of this class; nothing else in the engine does so again.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep only the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches p."""
    min_p: float = 0.0
    """Keep tokens at least this share of the likeliest one's probability."""
    seed: int | None = None
    """Draws depend on (seed, position) alone; None lets whoever begins the stream pick one."""
    max_tokens: int | None = None
    """Tokens to generate at most; None goes up to the model's context."""
    min_tokens: int = 0
    """End-of-sequence and stop tokens are not chosen, and stop strings not looked for, before so many tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output, as transformers' (Keskar et al., CTRL, 2019); 1 is off."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """None: no log-probabilities; k: those of the chosen token and of the k likeliest."""
    skip_special_tokens: bool = True
    depth: int | None = None
    """Layers that every token is to pass: those of an exit, or all. None is as the model is served."""
    exit_threshold: float | None = None
    """Confidence from which on a token may leave at an exit, where the model is served with early exits."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue. ``generated`` are tokens already delivered when a stream is resumed on another engine."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    generated: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. Log-probabilities and confidence come from the raw logits at temperature 1."""

    id: int
    logprob: float
    """Of this token; feeds perplexity."""
    confidence: float
    """The largest probability over the vocabulary; decides breaches (helios.md section 1)."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """The likeliest (id, logprob), best first, when asked for."""
    depth: int = 0
    """Layers that it passed."""
    breached: bool = False
    """It left at an exit with less confidence than asked for there."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    depth: float | None = None
    """Mean of the layers that the tokens passed; None where there is none."""
    confidence: float = 0.0
    """Mean of the tokens' confidence."""
    breaches: int = 0
    """Tokens that left at an exit with less confidence than asked for there."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one sweep added to one request. The last one of a request has a ``finish_reason``."""

    request_id: str
    tokens: tuple[Token, ...]
    text: str
    """Text that became final: may lag behind the tokens (half a character, a possible stop string)."""
    usage: Usage
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token id that ended the request, if one did."""
    error: HeliosError | None = None
    """Why, when ``finish_reason`` is "error"."""


Deliver = Callable[[Delta], None]
"""Takes a request's deltas, one after the other."""


@dataclass(frozen=True, slots=True)
class Completion:
    """All that was generated for one request."""

    request_id: str
    prompt_ids: tuple[int, ...]
    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    error: HeliosError | None = None

    @classmethod
    def gather(cls, request: Request, deltas: "list[Delta]") -> "Completion":
        """Put a request's deltas, the last of which has a finish_reason, together."""
        last = deltas[-1]
        return cls(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            text="".join(delta.text for delta in deltas),
            tokens=tuple(token for delta in deltas for token in delta.tokens),
            finish_reason=last.finish_reason or "error",
            stop_reason=last.stop_reason,
            usage=last.usage,
            error=last.error,
        )
