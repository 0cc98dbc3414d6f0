"""Sampling fields as JSON requests carry them: of HTTP bodies, lines of a batch file and command-line flags alike.

Types are strict: ``"0.5"`` is not a number and ``true`` is not a count. Ranges are the engine's business
(``engine.sampling.validate``), so that they are defined once. ``null`` means the same as leaving the field out.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError

from engine.errors import InvalidRequestError
from engine.request import SamplingParams

from .fields import shown


def _stop(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("must be a string or a list of strings")


def _token_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, list) and all(is_count(item) for item in value):
        return tuple(value)
    raise ValueError("must be a list of token ids")


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    for key, number in value.items():
        if not key.isdecimal() or not isinstance(number, int | float) or isinstance(number, bool):
            raise ValueError(f'must be an object like {{"50256": -100}}; it has {shown(key)}: {shown(number)}')
    return {int(key): float(number) for key, number in value.items()}


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class Sampling(BaseModel):
    """Fields of ``SamplingParams``, each under the same name. ``logprobs`` differs between the endpoints: see there."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

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

    # Extensions of our own: where tokens leave the model.
    depth: int | None = None
    exit_threshold: float | None = None

    def sampling_params(self, defaults: SamplingParams = SamplingParams()) -> SamplingParams:  # noqa: B008 (frozen)
        """What the engine is asked for; ``defaults`` stand where the request says nothing."""
        given = {name: getattr(self, name) for name in Sampling.model_fields}
        return replace(defaults, **{name: value for name, value in given.items() if value is not None})


Model = TypeVar("Model", bound=BaseModel)


def validated(kind: type[Model], fields: Mapping[str, Any]) -> Model:
    """``kind`` of ``fields``. Raises InvalidRequestError for the first fault: the field, its value, what is allowed."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        raise InvalidRequestError(f"'{field}' is missing; the request needs it", field)
    if first["type"] == "value_error":
        raise InvalidRequestError(f"'{field}' is {shown(first['input'])}; it {first['ctx']['error']}", field)
    allowed = first["msg"].replace("Input should be", "it must be")
    raise InvalidRequestError(f"'{field}' is {shown(first['input'])}; {allowed}", field)
