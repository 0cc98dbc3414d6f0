"""The one place where sampling parameters are checked; the rest of the engine trusts them."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ..errors import InvalidRequestError
from ..numbers import is_number
from ..request import SamplingParams

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 128
"""Far below any vocabulary: banning them all before ``min_tokens`` must leave something to choose."""


def validate(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """Return ``params``, its ``top_k`` of -1 ("off" in some clients) written as 0.

    Raises InvalidRequestError whose ``param`` is the field that has a wrong type or is out of range.
    """
    _number("temperature", params.temperature, 0, 100)
    _number("top_p", params.top_p, 0, 1, above=True)
    _number("min_p", params.min_p, 0, 1)
    _number("presence_penalty", params.presence_penalty, -2, 2)
    _number("frequency_penalty", params.frequency_penalty, -2, 2)
    _number("repetition_penalty", params.repetition_penalty, 0, math.inf, above=True)
    _integer("top_k", params.top_k, -1)
    _optional_integer("seed", params.seed, -(2**63), 2**63 - 1)
    _optional_integer("logprobs", params.logprobs, 0, MAX_LOGPROBS)
    _optional_integer("max_tokens", params.max_tokens, 1)
    _integer("min_tokens", params.min_tokens, 0)
    _optional_integer("depth", params.depth, 1)
    if params.exit_threshold is not None:
        _number("exit_threshold", params.exit_threshold, 0, 1)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {params.min_tokens}; it must not exceed max_tokens, {params.max_tokens}", "min_tokens"
        )
    for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
        value = getattr(params, name)
        if not isinstance(value, bool):
            raise _refused(name, value, "true or false")
    _stop_strings(params.stop)
    _stop_token_ids(params.stop_token_ids, vocab_size)
    _logit_bias(params.logit_bias, vocab_size)
    return params if params.top_k >= 0 else replace(params, top_k=0)


def _refused(name: str, value: object, wanted: str, param: str | None = None) -> InvalidRequestError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return InvalidRequestError(f"{name} is {shown}; it must be {wanted}", param or name)


def _number(name: str, value: Any, least: float, most: float, above: bool = False, param: str | None = None) -> None:
    """A finite number in [least, most], or in (least, most] if ``above``. A bool is not a number."""
    low = f"above {least:g}" if above else f"at least {least:g}"
    wanted = f"a finite number {low}" + (f" and at most {most:g}" if most != math.inf else "")
    if not is_number(value):
        raise _refused(name, value, wanted, param)
    if not least <= value <= most or (above and value == least):
        raise _refused(name, value, wanted, param)


def _integer(name: str, value: Any, least: int, most: int | None = None, param: str | None = None) -> None:
    wanted = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        raise _refused(name, value, wanted, param)


def _optional_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    if value is not None:
        _integer(name, value, least, most)


def _sequence(name: str, value: Any, wanted: str) -> Collection[Any]:
    if not isinstance(value, (tuple, list)):  # a str is a sequence of its characters, which nobody means
        raise _refused(name, value, wanted)
    return value


def _stop_strings(stop: Any) -> None:
    wanted = f"at most {MAX_STOP_STRINGS} non-empty strings"
    strings = _sequence("stop", stop, wanted)
    if len(strings) > MAX_STOP_STRINGS or not all(isinstance(text, str) and text for text in strings):
        raise _refused("stop", stop, wanted)


def _stop_token_ids(ids: Any, vocab_size: int) -> None:
    wanted = f"at most {MAX_STOP_TOKEN_IDS} token ids"
    if len(_sequence("stop_token_ids", ids, wanted)) > MAX_STOP_TOKEN_IDS:
        raise _refused("stop_token_ids", ids, wanted)
    for token_id in ids:
        _integer("a token of stop_token_ids", token_id, 0, vocab_size - 1, param="stop_token_ids")


def _logit_bias(bias: Any, vocab_size: int) -> None:
    if not isinstance(bias, Mapping):
        raise _refused("logit_bias", bias, "a map from token ids to numbers")
    for token_id, value in bias.items():
        _integer("a token of logit_bias", token_id, 0, vocab_size - 1, param="logit_bias")
        _number(f"logit_bias[{token_id}]", value, -100, 100, param="logit_bias")
