"""The bodies of /v1/completions and /v1/chat/completions, and the sampling parameters they ask for.

Types are strict: ``"0.5"`` is not a number and ``true`` is not a count. Ranges are the engine's business
(``engine.sampling.validate``), so that they are defined once. ``null`` means the same as leaving the field out.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from engine.errors import InvalidRequestError
from engine.request import SamplingParams

from .fields import served_fields, shown
from .messages import ChatMessage, messages

AUTO = "auto"
"""The model name that leaves the choice to the router."""
COMPLETION_MAX_TOKENS = 16
"""The documented default of /v1/completions; chat has none and goes up to the model's context."""

Prompt = str | tuple[int, ...]
"""Text to tokenise, or token ids as they are."""


def _stop(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("must be a string or a list of strings")


def _token_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, list) and all(_is_count(item) for item in value):
        return tuple(value)
    raise ValueError("must be a list of token ids")


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    for key, number in value.items():
        if not key.isdecimal() or not isinstance(number, int | float) or isinstance(number, bool):
            raise ValueError(f'must be an object like {{"50256": -100}}; it has {shown(key)}: {shown(number)}')
    return {int(key): float(number) for key, number in value.items()}


def _prompts(value: Any) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(_is_count(item) for item in value):
            return (tuple(value),)
        if all(isinstance(item, list) and all(_is_count(i) for i in item) for item in value):
            return tuple(tuple(item) for item in value)
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool | None = None
    """Send the token counts in one more chunk, after the last choice."""
    include_obfuscation: bool | None = None
    """Accepted without effect: chunks are never padded."""


class Generation(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str = AUTO
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stop)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_bias)] | None = None

    # Extensions, named as in vLLM.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Annotated[tuple[int, ...], PlainValidator(_token_ids)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("'stream_options' is only allowed with stream=true; remove it", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    def _params(self, **specific: Any) -> SamplingParams:
        """SamplingParams' own defaults stand where the request says nothing."""
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS} | specific
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


_SAMPLING_FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "skip_special_tokens"),
)


class CompletionRequest(Generation):
    """A body of /v1/completions."""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_prompts)]
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside each chosen one."""

    def sampling_params(self) -> SamplingParams:
        limit = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self._params(max_tokens=limit, logprobs=self.logprobs)


class ChatRequest(Generation):
    """A body of /v1/chat/completions."""

    messages: Annotated[tuple[ChatMessage, ...], PlainValidator(messages)]
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

    def sampling_params(self) -> SamplingParams:
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return self._params(max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


Body = TypeVar("Body", bound=Generation)


def parse(kind: type[Body], body: Any) -> Body:
    """A request from its decoded JSON. Raises InvalidRequestError naming the field, its value and what is allowed."""
    if not isinstance(body, Mapping):
        raise InvalidRequestError(f"the body is {shown(body)}; it must be a JSON object")
    try:
        return kind.model_validate(served_fields(body, kind.model_fields))
    except ValidationError as error:
        raise _explained(error) from None


def _explained(error: ValidationError) -> InvalidRequestError:
    """The first complaint, in the project's words."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return InvalidRequestError(f"'{field}' is missing; the request needs it", field)
    if first["type"] == "value_error":
        return InvalidRequestError(f"'{field}' is {shown(first['input'])}; it {first['ctx']['error']}", field)
    allowed = first["msg"].replace("Input should be", "it must be")
    return InvalidRequestError(f"'{field}' is {shown(first['input'])}; {allowed}", field)
