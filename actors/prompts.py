"""What callers may send: a prompt as text, messages or token ids, and sampling parameters as an object or a mapping."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from engine.errors import InvalidRequestError
from engine.request import SamplingParams
from engine.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]
"""Text to continue, a conversation of {"role", "content"} messages, or token ids."""
Sampling = SamplingParams | Mapping[str, Any] | None

_FIELDS = tuple(field.name for field in fields(SamplingParams))


def encode(tokenizer: Tokenizer, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of a prompt. Raises InvalidRequestError for what is no prompt, or messages the template refuses."""
    if isinstance(prompt, str):
        return tuple(tokenizer.encode(prompt))
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            return tuple(item for item in prompt if isinstance(item, int))
        if all(isinstance(item, Mapping) for item in prompt):
            return tuple(tokenizer.apply_chat_template([item for item in prompt if isinstance(item, Mapping)]))
    raise InvalidRequestError(
        f"the prompt is a {type(prompt).__name__}; give text, a list of messages or a list of token ids", "prompt"
    )


def sampling_params(given: Sampling) -> SamplingParams:
    """Sampling parameters of a call. Values are checked by the engine, names here.

    Raises InvalidRequestError that names an unknown parameter and the one that was probably meant.
    """
    if given is None:
        return SamplingParams()
    if isinstance(given, SamplingParams):
        return given
    for name in given:
        if name not in _FIELDS:
            close = get_close_matches(str(name), _FIELDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(_FIELDS)}"
            raise InvalidRequestError(f"'{name}' is not a sampling parameter; {hint}", str(name))
    values = dict(given)
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    for name in ("stop", "stop_token_ids"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    return SamplingParams(**values)
