import json

import pytest

from deploy.openai.errors import BodyTooLargeError, NotReadyError, RequestTimeoutError, reply_to, reply_to_status
from engine.errors import (
    CheckpointError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequestError("bad"), 400, None),
        (BodyTooLargeError("big"), 413, "request_too_large"),
        (ModelNotFoundError("none"), 404, "model_not_found"),
        (OverloadedError("full"), 503, "overloaded"),
        (NotReadyError("loading"), 503, "model_not_ready"),
        (EngineDeadError("dead"), 503, "model_not_ready"),
        (RequestTimeoutError("slow"), 504, "timeout"),
        (CheckpointError("torn"), 500, None),
        (RuntimeError("secret"), 500, "internal_error"),
    ],
)
def test_each_error_has_its_status_and_code(error, status, code):
    reply = reply_to(error)
    assert (reply.status, reply.code) == (status, code)
    assert set(reply.body()["error"]) == {"message", "type", "param", "code"}
    json.dumps(reply.body())


def test_an_invalid_request_names_its_field():
    assert reply_to(InvalidRequestError("bad", "top_p")).param == "top_p"


def test_the_text_of_an_unforeseen_error_stays_inside():
    assert "secret" not in reply_to(RuntimeError("secret")).message


def test_an_overloaded_server_says_when_to_come_back():
    assert reply_to(OverloadedError("full", retry_after_s=1.2)).headers == {"retry-after": "2"}
    assert reply_to(OverloadedError("full", retry_after_s=0.0)).headers == {"retry-after": "1"}


def test_a_model_that_is_not_ready_says_when_to_come_back():
    assert int(reply_to(NotReadyError("loading")).headers["retry-after"]) >= 1


def test_unknown_paths_and_methods_are_named():
    assert "/nope" in reply_to_status(404, "GET", "/nope").message
    reply = reply_to_status(405, "GET", "/v1/completions", {"allow": "POST"})
    assert (reply.status, reply.headers["allow"]) == (405, "POST")
    assert "use POST" in reply.message
