"""Errors as the OpenAI API shapes them: ``{"error": {message, type, param, code}}`` with the status that fits."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from actors.failures import StoppingError
from engine.errors import EngineDeadError, HeliosError, InvalidRequestError, ModelNotFoundError, OverloadedError


class BodyTooLargeError(InvalidRequestError):
    """The request's body is longer than ``http.max_body_bytes``."""


class EncodedBodyError(InvalidRequestError):
    """The request's body is compressed."""


class NotReadyError(HeliosError):
    """The model exists and cannot answer now: it is loading, or being started again."""


class RequestTimeoutError(HeliosError):
    """The request took longer than ``http.request_timeout_s``; what was running for it has been cancelled."""


def timed_out(limit_s: float) -> RequestTimeoutError:
    return RequestTimeoutError(
        f"the request took longer than {limit_s:g} s (http.request_timeout_s); ask for fewer tokens"
    )


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """What a client is told. ``headers`` are lower-case."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


INVALID = "invalid_request_error"
SERVER = "server_error"
_RETRY_NOT_READY_S = 5


def reply_to(error: BaseException) -> ErrorReply:
    """The reply for an exception. Only a HeliosError's text is shown: any other may hold paths and prompts."""
    text = str(error)
    match error:
        case BodyTooLargeError():
            return ErrorReply(413, text, INVALID, code="request_too_large")
        case EncodedBodyError():
            return ErrorReply(415, text, INVALID, code="unsupported_encoding")
        case InvalidRequestError():
            return ErrorReply(400, text, INVALID, param=error.param)
        case ModelNotFoundError():
            return ErrorReply(404, text, INVALID, param="model", code="model_not_found")
        case OverloadedError():
            return ErrorReply(503, text, "overloaded_error", code="overloaded", headers=_retry(error.retry_after_s))
        case NotReadyError() | StoppingError() | EngineDeadError():
            return ErrorReply(503, text, SERVER, code="model_not_ready", headers=_retry(_RETRY_NOT_READY_S))
        case RequestTimeoutError():
            return ErrorReply(504, text, SERVER, code="timeout")
        case HeliosError():
            return ErrorReply(500, text, SERVER)
    return ErrorReply(500, "internal error; the server's log has the details", SERVER, code="internal_error")


def reply_to_status(status: int, method: str, path: str, headers: Mapping[str, str] | None = None) -> ErrorReply:
    """The reply for what the web framework refuses by itself: a path or a method that is not there."""
    kept = dict(headers or {})
    if status == HTTPStatus.NOT_FOUND:
        return ErrorReply(404, f"there is no {path} here; GET / lists what there is", INVALID, code="unknown_url")
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = kept.get("allow") or kept.get("Allow") or "another method"
        message = f"{path} does not take {method}; use {allowed}"
        return ErrorReply(405, message, INVALID, code="method_not_allowed", headers=kept)
    kind = INVALID if status < HTTPStatus.INTERNAL_SERVER_ERROR else SERVER
    return ErrorReply(status, HTTPStatus(status).phrase.lower(), kind, headers=kept)


def _retry(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}
