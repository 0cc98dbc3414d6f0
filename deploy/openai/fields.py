"""Which request fields are served, which are accepted without effect, and which are refused by name.

A field that would change the result and is not served is an error, never ignored; a field that only labels, stores or
hints is accepted. So nothing a client asks for is dropped silently.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from engine.errors import InvalidRequestError

WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Labels and hints: whatever their value, the tokens are the same."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """``harmless``: does a value ask for nothing more than what is served? ``remedy``: what to do about others."""

    harmless: Callable[[Any], bool]
    remedy: str


def _one_of(*values: Any) -> Callable[[Any], bool]:
    # Compared with the type, because True == 1 in Python and `"n": true` is not a count.
    return lambda given: any(type(given) is type(value) and given == value for value in values)


_NO_TOOLS = Refusal(_one_of([]), "tool calls are not served; describe the tools in the prompt instead")
_ONE_CHOICE = Refusal(_one_of(1), "one choice for each prompt is served; send the prompt as often as needed")

REFUSED: Mapping[str, Refusal] = {
    "audio": Refusal(_one_of(), "only text is generated; leave it out"),
    "best_of": _ONE_CHOICE,
    "echo": Refusal(_one_of(False), "the prompt is not repeated in the output; prepend it in the client"),
    "function_call": Refusal(_one_of("none", "auto"), _NO_TOOLS.remedy),
    "functions": _NO_TOOLS,
    "modalities": Refusal(_one_of(["text"]), 'only text is generated; leave it out or send ["text"]'),
    "moderation": Refusal(_one_of(), "outputs are not moderated; leave it out"),
    "n": _ONE_CHOICE,
    "reasoning_effort": Refusal(_one_of("none"), "no reasoning effort can be set on these models; leave it out"),
    "response_format": Refusal(
        _one_of({"type": "text"}), 'only {"type": "text"} is served; ask for JSON in the prompt'
    ),
    "suffix": Refusal(_one_of(""), "insertion before a suffix is not served; leave it out"),
    "tool_choice": Refusal(_one_of("none", "auto"), _NO_TOOLS.remedy),
    "tools": _NO_TOOLS,
    "verbosity": Refusal(_one_of("medium"), "verbosity cannot be set on these models; ask for it in the prompt"),
    "web_search_options": Refusal(_one_of(), "the web is not searched; leave it out"),
}
"""Documented fields that are not served. ``null`` is always harmless."""


def served_fields(body: Mapping[str, Any], served: Collection[str]) -> dict[str, Any]:
    """The part of ``body`` that has an effect.

    Raises InvalidRequestError for a field that is refused with its value, and for one that nobody knows.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name in served:
            kept[name] = value
        elif name in REFUSED:
            refusal = REFUSED[name]
            if value is not None and not refusal.harmless(value):
                raise InvalidRequestError(f"'{name}' is {shown(value)}, which is not served: {refusal.remedy}", name)
        elif name not in WITHOUT_EFFECT:
            raise InvalidRequestError(f"unknown field {shown(name)}{_suggestion(name, served)}", name)
    return kept


def shown(value: Any, limit: int = 80) -> str:
    """A value as an error message shows it: as JSON, a string in single quotes, cut to ``limit`` characters."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= limit else text[:limit] + "…"


ELSEWHERE: Mapping[str, str] = {
    "max_completion_tokens": "it is called max_tokens here",
    "top_logprobs": "logprobs is the number of tokens here",
    "messages": "conversations go to /v1/chat/completions",
    "prompt": "prompts go to /v1/completions, messages here",
}
"""Fields of the other endpoint, and what they are here."""


def _suggestion(name: str, served: Collection[str]) -> str:
    if name in ELSEWHERE:
        return f"; {ELSEWHERE[name]}"
    known = [*served, *REFUSED, *WITHOUT_EFFECT]
    close = get_close_matches(name, known, n=3)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; the fields with an effect are {', '.join(sorted(served))}"
