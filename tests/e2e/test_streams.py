"""Many streams at once, clients that leave, and actors that die."""

import asyncio
import json
import os
import signal
import time

import httpx
import pytest

from engine.checkpoint.store import DEFAULT_MODEL

from .conftest import MAX_QUEUED

pytestmark = [pytest.mark.cluster, pytest.mark.model]

ENDLESS = {"model": DEFAULT_MODEL, "prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True}
"""Longer than any test waits."""


def greedy(prompt, tokens):
    return {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def alone(server, body):
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]


async def texts(response):
    """The texts of a stream as they come; fails on an error event, and if it ends without saying that it does."""
    last = None
    async for line in response.aiter_lines():
        if line:
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                chunk = json.loads(last)
                assert "error" not in chunk, chunk
                yield chunk["choices"][0]["text"]
    assert last == "[DONE]"


@pytest.fixture
async def http(server):
    server.await_idle()
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        yield client
    server.await_idle()


async def test_a_client_that_hangs_up_on_a_stream_frees_its_sequence(server, http):
    before = server.stats()["cancelled_requests"]
    async with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response:
        received = texts(response)
        for _ in range(3):
            await anext(received)
        assert server.stats()["kv_blocks_used"] > 0
    assert server.await_idle(5)["cancelled_requests"] == before + 1


async def test_a_client_that_gives_up_on_an_answer_frees_its_sequence(server, http):
    before = server.stats()["cancelled_requests"]
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/completions", json=ENDLESS, timeout=1)
    assert server.await_idle(5)["cancelled_requests"] == before + 1


async def test_32_streams_at_once_are_each_as_alone_and_none_waits_for_another(server, http):
    bodies = [greedy(f"The number {number} is", 12) for number in range(32)]
    expected = [alone(server, body) for body in bodies]
    first_s, last_s = {}, {}

    async def read(index, body):
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            parts = []
            async for text in texts(response):
                first_s.setdefault(index, time.monotonic())
                parts.append(text)
            last_s[index] = time.monotonic()
            return "".join(parts)

    got = await asyncio.gather(*(read(index, body) for index, body in enumerate(bodies)))
    assert got == expected
    assert max(first_s.values()) < min(last_s.values()), "a stream had no token when another had all"


async def test_a_full_server_says_so_at_once_and_when_to_come_back(http):
    async def hold(started):
        async with http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response:
            assert response.status_code == 200
            started.set()
            await asyncio.Event().wait()

    events = [asyncio.Event() for _ in range(MAX_QUEUED)]
    holders = [asyncio.create_task(hold(event)) for event in events]
    try:
        await asyncio.gather(*(event.wait() for event in events))
        begun_s = time.monotonic()
        refused = await http.post("/v1/completions", json=ENDLESS)
        assert time.monotonic() - begun_s < 2
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await http.get("/v1/models")).status_code == 200
    finally:
        for holder in holders:
            holder.cancel()
        await asyncio.gather(*holders, return_exceptions=True)


async def test_a_stream_outlives_its_model_actor_without_a_repeated_token(server, http):
    body = greedy("Photosynthesis is the process by which", 60)
    expected = alone(server, body)
    victim = server.replica()["info"]
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        received = texts(response)
        parts = [await anext(received) for _ in range(5)]
        os.kill(victim["pid"], signal.SIGKILL)
        parts += [text async for text in received]
    assert "".join(parts) == expected
    reborn = server.replica()["info"]
    assert reborn["pid"] != victim["pid"]
    assert alone(server, body) == expected
