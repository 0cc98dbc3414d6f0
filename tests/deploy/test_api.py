"""The routes, as far as they go without a model."""

import json

import httpx
import pytest

from actors.config import load_config
from actors.messages import Health
from actors.session import Session
from deploy.http.api import build_api
from deploy.http.service import Service
from deploy.http.status import HealthCheck

CONFIG = load_config({"models": [{"name": "small"}, {"name": "org/large"}], "http": {"max_body_bytes": 2000}})
HELLO = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def client():
    transport = httpx.ASGITransport(build_api(Service(CONFIG, Session("helios"))), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def test_every_model_and_auto_is_listed(client):
    listed = (await client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["small", "org/large", "auto"]
    assert (await client.get("/v1/models/org/large")).json() == listed["data"][1]


class Places:
    """What ``Directory`` says of the replicas, with their checks given."""

    def __init__(self, *checks: Health) -> None:
        self._checks = checks

    async def replicas(self) -> list[tuple[str, int]]:
        return [("small", i) for i in range(len(self._checks))]

    async def check(self, model: str, replica: int, wait_s: float) -> Health:
        return self._checks[replica]


@pytest.mark.parametrize(
    ("checks", "code"),
    [((), 503), ((False,), 503), ((False, True), 200)],
)
async def test_health_fails_when_no_replica_could_generate_a_token(checks, code):
    service = Service(CONFIG, Session("helios"))
    service._health = HealthCheck(Places(*(Health(ok, 0.1, "generated one token" if ok else "dead") for ok in checks)))
    transport = httpx.ASGITransport(build_api(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.get("/health")
    assert (response.status_code, response.json()["ok"]) == (code, code == 200)
    assert [replica["ok"] for replica in response.json()["replicas"]] == list(checks)


async def test_an_unknown_model_is_told_which_there_are(client):
    for response in (
        await client.get("/v1/models/huge"),
        await client.post("/v1/chat/completions", json={**HELLO, "model": "huge"}),
        await client.post("/v1/completions", json={"model": "huge", "prompt": "hi"}),
    ):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "small, org/large, auto" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"temperature": NaN}', b"\xff"])
async def test_a_body_that_cannot_be_read_is_refused(client, path, body):
    response = await client.post(path, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_an_empty_prompt_is_refused_by_name(client):
    response = await client.post("/v1/completions", json={"prompt": ["a", ""]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


async def test_more_prompts_than_there_are_places_are_refused_for_good(client):
    response = await client.post("/v1/completions", json={"prompt": [[1]] * 129})
    assert response.status_code == 400
    assert "http.max_queued" in response.json()["error"]["message"]


async def test_a_body_over_the_limit_is_refused(client):
    response = await client.post("/v1/completions", json={"prompt": "x" * 3000})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


async def test_a_body_over_the_limit_is_refused_without_a_declared_length(client):
    async def chunks():
        for _ in range(30):
            yield b"x" * 100

    assert (await client.post("/v1/completions", content=chunks())).status_code == 413


async def test_a_compressed_body_is_refused_as_such(client):
    response = await client.post("/v1/completions", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_encoding")
    assert "'gzip'; send it as it is" in response.json()["error"]["message"]


async def test_a_field_of_the_other_endpoint_is_told_what_it_is_here(client):
    response = await client.post("/v1/completions", json={"prompt": "a", "max_completion_tokens": 5})
    assert "it is called max_tokens here" in response.json()["error"]["message"]


async def test_values_are_shown_as_json_has_them(client):
    response = await client.post("/v1/completions", json={"prompt": None})
    assert "'prompt' is null;" in response.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nope", 404), ("GET", "/v1/completions", 405)])
async def test_unknown_routes_are_refused_in_the_apis_own_shape(client, method, path, status):
    response = await client.request(method, path)
    assert response.status_code == status
    assert path in response.json()["error"]["message"]


async def test_the_schema_shows_the_bodies(client):
    paths = (await client.get("/openapi.json")).json()["paths"]
    shown = json.dumps(paths["/v1/chat/completions"]["post"]["requestBody"])
    assert "max_completion_tokens" in shown


async def test_the_index_points_to_the_routes(client):
    assert "/v1/chat/completions" in (await client.get("/")).text
