"""Response objects and stream chunks of both endpoints, as dictionaries ready to be written as JSON.

A ``Shape`` is one response: its id, time and model, and how its endpoint draws choices, chunks and log-probabilities.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from engine.request import FinishReason, Token, Usage

Json = dict[str, Any]
MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""


class Vocabulary(Protocol):
    """What log-probabilities need of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes a token adds to the text; may be a part of a character."""


@dataclass(slots=True)
class Choice:
    """One prompt's output as it grows."""

    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Shape(ABC):
    """One response. ``vocabulary`` is there exactly if log-probabilities are asked for."""

    model: str
    fingerprint: str
    vocabulary: Vocabulary | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    prefix: ClassVar[str]
    whole: ClassVar[str]
    part: ClassVar[str]

    def response(self, choices: Iterable[Choice], usage: Usage) -> Json:
        """The object of a request that does not stream."""
        return self._object(self.whole, [self._whole_choice(choice) for choice in choices], usage=usage_json(usage))

    def chunk(self, index: int, text: str, tokens: Sequence[Token], offset: int, finish: FinishReason | None) -> Json:
        """What one delta adds to choice ``index``. ``offset``: characters of its tokens sent before."""
        return self._object(self.part, [self._chunk_choice(index, text, self._logprobs(tokens, offset), finish)])

    def usage_chunk(self, usage: Usage) -> Json:
        """The chunk with the token counts and no choices that ends a stream with ``include_usage``."""
        return self._object(self.part, [], usage=usage_json(usage))

    @abstractmethod
    def opening_chunks(self, choices: int) -> list[Json]:
        """Chunks that come before the first token."""

    @abstractmethod
    def _whole_choice(self, choice: Choice) -> Json: ...

    @abstractmethod
    def _chunk_choice(self, index: int, text: str, logprobs: Json | None, finish: FinishReason | None) -> Json: ...

    @abstractmethod
    def _draw_logprobs(self, vocabulary: Vocabulary, tokens: Sequence[Token], offset: int) -> Json: ...

    def _logprobs(self, tokens: Sequence[Token], offset: int = 0) -> Json | None:
        if self.vocabulary is None:
            return None
        return self._draw_logprobs(self.vocabulary, tokens, offset)

    def _object(self, kind: str, choices: list[Json], **more: Any) -> Json:
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }


@dataclass(frozen=True, slots=True)
class ChatShape(Shape):
    """/v1/chat/completions."""

    prefix: ClassVar[str] = "chatcmpl"
    whole: ClassVar[str] = "chat.completion"
    part: ClassVar[str] = "chat.completion.chunk"

    def opening_chunks(self, choices: int) -> list[Json]:
        role = {"role": "assistant", "content": ""}
        return [self._object(self.part, [_choice(index, None, None, delta=role)]) for index in range(choices)]

    def _whole_choice(self, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return _choice(choice.index, self._logprobs(choice.tokens), choice.finish_reason, message=message)

    def _chunk_choice(self, index: int, text: str, logprobs: Json | None, finish: FinishReason | None) -> Json:
        return _choice(index, logprobs, finish, delta={"content": text} if text else {})

    def _draw_logprobs(self, vocabulary: Vocabulary, tokens: Sequence[Token], offset: int) -> Json:
        return {"content": [self._token(vocabulary, token) for token in tokens], "refusal": None}

    def _token(self, vocabulary: Vocabulary, token: Token) -> Json:
        best = [_chat_token(vocabulary, token_id, logprob) for token_id, logprob in token.top_logprobs]
        return {**_chat_token(vocabulary, token.id, token.logprob), "top_logprobs": best}


@dataclass(frozen=True, slots=True)
class TextShape(Shape):
    """/v1/completions."""

    prefix: ClassVar[str] = "cmpl"
    whole: ClassVar[str] = "text_completion"
    part: ClassVar[str] = "text_completion"

    def opening_chunks(self, choices: int) -> list[Json]:
        return []

    def _whole_choice(self, choice: Choice) -> Json:
        return _choice(choice.index, self._logprobs(choice.tokens), choice.finish_reason, text=choice.text)

    def _chunk_choice(self, index: int, text: str, logprobs: Json | None, finish: FinishReason | None) -> Json:
        return _choice(index, logprobs, finish, text=text)

    def _draw_logprobs(self, vocabulary: Vocabulary, tokens: Sequence[Token], offset: int) -> Json:
        texts = [token_text(vocabulary, token.id) for token in tokens]
        offsets: list[int] = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {token_text(vocabulary, token_id): finite(logprob) for token_id, logprob in token.top_logprobs}
                for token in tokens
            ],
            "text_offset": offsets,
        }


def token_text(vocabulary: Vocabulary, token_id: int) -> str:
    """A token as text; the bytes of half a character are written ``\\xe2``."""
    return vocabulary.token_bytes(token_id).decode("utf-8", errors="backslashreplace")


def usage_json(usage: Usage) -> Json:
    counts: Json = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.depth is None:
        return counts
    mean = round(usage.confidence, 4)
    return {**counts, "helios": {"depth": usage.depth, "mean_confidence": mean, "breaches": usage.breaches}}


def add_usage(usages: Iterable[Usage]) -> Usage:
    """The sum over the choices of one response."""
    counted = list(usages)
    tokens = sum(u.completion_tokens for u in counted)
    depths = {u.depth for u in counted}
    return Usage(
        sum(u.prompt_tokens for u in counted),
        tokens,
        depths.pop() if len(depths) == 1 else None,
        sum(u.confidence * u.completion_tokens for u in counted) / max(1, tokens),
        sum(u.breaches for u in counted),
    )


def _choice(index: int, logprobs: Json | None, finish: FinishReason | None, **content: Any) -> Json:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}


def _chat_token(vocabulary: Vocabulary, token_id: int, logprob: float) -> Json:
    return {
        "token": token_text(vocabulary, token_id),
        "logprob": finite(logprob),
        "bytes": list(vocabulary.token_bytes(token_id)),
    }


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
