"""Input lines of a batch: what each asks for, and what is wrong with it."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from engine.errors import ConfigError, InvalidRequestError
from engine.request import SamplingParams

from ..openai.body import decode_json
from ..openai.fields import REFUSED, shown
from ..openai.messages import ChatMessage, parse_messages
from ..openai.protocol import AUTO, ChatRequest, CompletionRequest
from ..openai.sampling import Sampling, validated
from .openai_form import fields_of, is_openai_form

_SOURCES = ("prompt", "messages", "prompt_ids")
_BOM = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 64 << 20
"""More text than any model's context holds."""


class BatchFields(Sampling):
    """The fields of a line that have a meaning here."""

    prompt: str | None = None
    messages: Annotated[tuple[ChatMessage, ...], PlainValidator(parse_messages)] | None = None
    prompt_ids: list[Annotated[int, Field(ge=0)]] | None = None
    logprobs: int | None = None

    def params(self, defaults: SamplingParams) -> SamplingParams:
        return replace(self.sampling_params(defaults), logprobs=self.logprobs)


_OF_REQUESTS = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *REFUSED} - set(BatchFields.model_fields)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input as it is. ``number`` counts from 1, blank lines too, as editors do."""

    number: int
    raw: bytes

    def digest(self, context: str) -> str:
        """Ties a record to what it was made from: the line, and ``context``, all else that decides the result."""
        return hashlib.sha256(context.encode() + b"\n" + self.raw.strip()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Task:
    """A line that was understood."""

    fields: BatchFields
    id: str | int | None
    custom: Mapping[str, Any]
    """Fields without a meaning here; they are copied to the output."""


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of ``path`` that are not blank. Raises ConfigError if it cannot be read."""
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"{path} is no regular file, and it is read more than once; name one with one JSON object a line"
        )
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
                if len(raw) == MAX_LINE_BYTES:
                    raise ConfigError(
                        f"{path}, line {number} is longer than {MAX_LINE_BYTES >> 20} MiB; give each prompt a line"
                    )
                content = raw.removeprefix(_BOM) if number == 1 else raw
                if content.strip():
                    yield Line(number, content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name a file with one JSON object a line") from None


def count_lines(path: Path) -> int:
    return sum(1 for _ in read_lines(path))


def parse_line(line: Line, model: str = AUTO) -> Task:
    """What a line asks for; ``model`` is the one that runs.

    Raises InvalidRequestError that names the field, its value and what is allowed.
    """
    body = decode_json(line.raw, "line")
    if not isinstance(body, dict):
        raise InvalidRequestError(f"the line is {shown(body)}; it must be a JSON object")
    if is_openai_form(body):
        return Task(BatchFields.model_construct(**fields_of(body, model)), _id(body, "custom_id"), {})
    record_id = _id(body, "id")
    body.pop("id", None)
    known = {name: value for name, value in body.items() if name in BatchFields.model_fields}
    custom = {name: value for name, value in body.items() if name not in known}
    for name in custom:
        _must_be_custom(name)
    given = [name for name in _SOURCES if known.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"the line has {' and '.join(given) or 'no prompt'}; give one of {', '.join(_SOURCES)}"
        )
    return Task(validated(BatchFields, known), record_id, custom)


def id_of(line: Line) -> str | int | None:
    """The id of a line that cannot be run, as far as it can be read."""
    with suppress(InvalidRequestError):
        body = decode_json(line.raw, "line")
        if isinstance(body, dict):
            return _id(body, "custom_id" if is_openai_form(body) else "id")
    return None


def _id(body: Mapping[str, Any], name: str) -> str | int | None:
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        raise InvalidRequestError(f"'{name}' is {shown(value)}; it must be a string or an integer", name)
    return value


def _must_be_custom(name: str) -> None:
    """A field that would be taken for a request's own, and then do nothing, is refused."""
    if name in _OF_REQUESTS:
        raise InvalidRequestError(f"{shown(name)} has no effect in a batch; remove it", name)
    if close := get_close_matches(name, BatchFields.model_fields, n=1, cutoff=0.85):
        raise InvalidRequestError(f"unknown field {shown(name)}; did you mean {close[0]}?", name)
