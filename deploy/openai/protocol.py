"""The bodies of /v1/completions and /v1/chat/completions, checked. Types are strict, as ``sampling.py`` says."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from engine.errors import InvalidRequestError
from engine.request import SamplingParams

from .fields import served_fields, shown
from .messages import ChatMessage, parse_messages
from .sampling import Sampling, is_count, validated

AUTO = "auto"
"""The model name that leaves the choice to the router."""
COMPLETION_DEFAULTS = SamplingParams(max_tokens=16)
CHAT_DEFAULTS = SamplingParams()
"""As documented by OpenAI: a completion has 16 tokens unless told otherwise; a chat goes up to the model's context."""

Prompt = str | tuple[int, ...]
"""Text to tokenise, or token ids as they are."""


def _prompts(value: Any) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(is_count(item) for item in value):
            return (tuple(value),)
        if all(isinstance(item, list) and all(is_count(i) for i in item) for item in value):
            return tuple(tuple(item) for item in value)
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool | None = None
    """Send the token counts in one more chunk, after the last choice."""
    include_obfuscation: bool | None = None
    """Accepted without effect: chunks are never padded."""


class Generation(Sampling):
    """What both endpoints take."""

    model: str = AUTO
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("'stream_options' is only allowed with stream=true; remove it", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True


class CompletionRequest(Generation):
    """A body of /v1/completions."""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_prompts)]
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside each chosen one."""

    def sampling_params(self, defaults: SamplingParams = COMPLETION_DEFAULTS) -> SamplingParams:
        return replace(super().sampling_params(defaults), logprobs=self.logprobs)


class ChatRequest(Generation):
    """A body of /v1/chat/completions."""

    messages: Annotated[tuple[ChatMessage, ...], PlainValidator(parse_messages)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_completion_tokens: int | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("'top_logprobs' is only allowed with logprobs=true; add it", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError(
                f"'max_tokens' is {self.max_tokens} and 'max_completion_tokens' is {self.max_completion_tokens}; "
                "they mean the same, send one of them",
                "max_tokens",
            )
        return self

    def sampling_params(self, defaults: SamplingParams = CHAT_DEFAULTS) -> SamplingParams:
        params = super().sampling_params(defaults)
        if self.max_completion_tokens is not None:
            params = replace(params, max_tokens=self.max_completion_tokens)
        return replace(params, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


Body = TypeVar("Body", bound=Generation)


def parse(kind: type[Body], body: Any) -> Body:
    """A request from its decoded JSON. Raises InvalidRequestError naming the field, its value and what is allowed."""
    if not isinstance(body, Mapping):
        raise InvalidRequestError(f"the body is {shown(body)}; it must be a JSON object")
    return validated(kind, served_fields(body, kind.model_fields))
