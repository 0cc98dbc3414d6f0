"""Chat messages: checked, and brought to the plain text form that a chat template takes."""

from collections.abc import Mapping
from typing import Any

from engine.errors import InvalidRequestError

from .fields import shown

ROLES: Mapping[str, str] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role in the request: role in the template. "developer" is the later name of "system"; templates know the older."""
_EMPTY_ECHOES = ("annotations", "audio", "function_call", "refusal", "tool_calls")
"""Fields of an assistant message that clients send back as they got them; harmless when null or empty."""


ChatMessage = dict[str, str]
"""As chat templates take it: role, content, and name if the client gave one."""


def parse_messages(value: Any) -> tuple[ChatMessage, ...]:
    """The messages of a chat request. Raises InvalidRequestError naming the message, the field and what is allowed."""
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(
            f"'messages' is {shown(value)}; it must be a list of at least one message", "messages"
        )
    return tuple(_message(f"messages[{index}]", item) for index, item in enumerate(value))


def _message(where: str, item: Any) -> ChatMessage:
    if not isinstance(item, dict):
        raise InvalidRequestError(f"'{where}' is {shown(item)}; it must be an object with role and content", where)
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(
            f"'{where}.role' is {shown(role)}; it must be one of {', '.join(ROLES)} (tool calls are not served)",
            f"{where}.role",
        )
    for field, given in item.items():
        if field in ("role", "content", "name") or (field in _EMPTY_ECHOES and not given):
            continue
        raise InvalidRequestError(
            f"'{where}.{field}' is {shown(given)}, which is not served; remove it", f"{where}.{field}"
        )
    message = {"role": ROLES[role], "content": _content(f"{where}.content", item.get("content"))}
    if item.get("name") is not None:
        message["name"] = _text(f"{where}.name", item["name"])
    return message


def _content(where: str, value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(_part(f"{where}[{index}]", part) for index, part in enumerate(value))
    return _text(where, value, "must be a string or a list of text parts")


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise InvalidRequestError(
            f"'{where}' is {shown(part)}; only parts like {{'type': 'text', 'text': …}} are served", where
        )
    return _text(f"{where}.text", part.get("text"))


def _text(where: str, value: Any, allowed: str = "must be a string") -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"'{where}' is {shown(value)}; it {allowed}", where)
    return value
