"""Streams over real actors, and what becomes of them when actors die."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest
import ray

from actors.directory import Directory
from actors.failures import ReplicaLostError
from actors.messages import Opened
from actors.names import NAMESPACE, router_actor_name
from actors.session import Session
from engine.errors import InvalidRequestError, ModelNotFoundError
from engine.request import SamplingParams

pytestmark = pytest.mark.cluster
SAMPLED = SamplingParams(seed=3, max_tokens=400, ignore_eos=True)


def _model(replica):
    return ray.get_actor(f"lab/tiny/{replica}", namespace=NAMESPACE)


async def _until(condition):
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.05)


async def _ready():
    """Whether the router takes both replicas for ready."""
    try:
        snapshot = await Directory("lab").snapshot()
    except ReplicaLostError:
        return False
    return [replica.state for replica in snapshot.models[0].replicas] == ["ready", "ready"]


def test_plain_ray_reaches_a_model_by_name(lab):
    completion = ray.get(_model(0).generate.remote("Hello", {"max_tokens": 16, "ignore_eos": True}))
    assert len(completion.tokens) == 16


async def test_a_stream_is_the_completion_in_parts(lab):
    session = Session("lab")
    opened, *deltas = [message async for message in session.stream("hello", SAMPLED, request_id="whole")]
    _, completion = await session.generate("hello", SAMPLED)
    assert isinstance(opened, Opened)
    assert {delta.request_id for delta in deltas} == {"whole"}
    assert "".join(delta.text for delta in deltas) == completion.text
    assert deltas[-1].usage.completion_tokens == 400


async def test_concurrent_streams_share_polls_and_stay_apart(lab):
    session = Session("lab")
    params = [SamplingParams(seed=i, max_tokens=40, ignore_eos=True) for i in range(8)]
    alone = [(await session.generate("hello", p))[1].text for p in params]
    together = await asyncio.gather(*(session.generate("hello", p) for p in params))
    assert [completion.text for _, completion in together] == alone


async def test_refusals_come_as_our_own_errors_before_the_stream_opens(lab):
    session = Session("lab")
    with pytest.raises(InvalidRequestError, match="top_p is 2") as caught:
        await anext(session.stream("hello", {"top_p": 2}))
    assert (type(caught.value), caught.value.param) == (InvalidRequestError, "top_p")
    with pytest.raises(ModelNotFoundError, match="'missing' is not served here"):
        await anext(session.stream("hello", model="missing"))


async def test_closing_a_stream_cancels_the_sequence_on_its_replica(lab):
    session = Session("lab")
    stream = session.stream("hello", SAMPLED)
    opened = await anext(stream)
    await anext(stream)
    before = await _model(opened.replica).stats.remote()
    await stream.aclose()

    async def cancelled():
        stats = await _model(opened.replica).stats.remote()
        return stats.cancelled_requests > before.cancelled_requests and stats.running == 0

    await _until(cancelled)


async def test_a_caller_that_goes_away_while_beginning_leaves_nothing_running(lab):
    session = Session("lab")
    task = asyncio.create_task(anext(session.stream("hello", SAMPLED)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def idle():
        stats = [await _model(replica).stats.remote() for replica in (0, 1)]
        return all(s.running == 0 and s.waiting == 0 for s in stats)

    await _until(idle)


async def test_ray_cancel_of_a_plain_stream_cancels_its_sequence(lab):
    model = _model(0)
    before = (await model.stats.remote()).cancelled_requests
    call = model.stream.options(num_returns="streaming").remote("hello", SAMPLED)
    await (await anext(call))
    await (await anext(call))
    ray.cancel(call)

    async def cancelled():
        return (await model.stats.remote()).cancelled_requests > before

    await _until(cancelled)


async def test_a_killed_replica_costs_a_stream_nothing_but_time(lab):
    session = Session("lab")
    await _until(_ready)
    _, whole = await session.generate("hello", SAMPLED)
    stream = session.stream("hello", SAMPLED)
    opened = await anext(stream)
    info = await _model(opened.replica).ready.remote()
    deltas = [await anext(stream)]
    os.kill(info.pid, signal.SIGKILL)
    deltas += [delta async for delta in stream]
    assert [t.id for delta in deltas for t in delta.tokens] == [t.id for t in whole.tokens]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert deltas[-1].finish_reason == "length"
    usage = deltas[-1].usage
    assert usage.confidence == pytest.approx(whole.usage.confidence)
    assert replace(usage, confidence=0.0) == replace(whole.usage, confidence=0.0)


async def test_streams_go_on_and_named_models_answer_while_the_router_is_away(lab):
    session = Session("lab")
    await _until(_ready)
    stream = session.stream("hello", SAMPLED)
    await anext(stream)
    router = ray.get_actor(router_actor_name("lab"), namespace=NAMESPACE)
    ray.kill(router, no_restart=False)
    opened, _ = await session.generate("hello", {"max_tokens": 4}, model="tiny")
    assert opened.model == "tiny"
    assert [delta async for delta in stream][-1].finish_reason == "length"
    opened, _ = await session.generate("hello", {"max_tokens": 4}, model="auto")
    assert opened.model == "tiny"


async def test_a_restarted_router_remembers_and_hears_from_the_replicas_again(lab):
    session, directory = Session("lab"), Directory("lab")
    await session.generate("hello", {"max_tokens": 4, "ignore_eos": True})
    router = ray.get_actor(router_actor_name("lab"), namespace=NAMESPACE)
    await router.flush.remote()
    before = (await directory.snapshot()).models[0].figures.tokens
    ray.kill(router, no_restart=False)

    async def remembered():
        try:
            return (await directory.snapshot()).models[0].figures.tokens >= before
        except ReplicaLostError:  # the kill may take effect between two calls
            return False

    await _until(remembered)
    await _until(_ready)


async def test_a_replica_whose_process_ended_is_restarted_and_found_again(lab):
    before = await _model(1).ready.remote()
    os.kill(before.pid, signal.SIGKILL)

    async def reborn():
        try:
            return (await _model(1).ready.remote()).epoch > before.epoch
        except ray.exceptions.RayActorError:
            return False

    await _until(reborn)
    await _until(_ready)
    assert (await Directory("lab").check("tiny", 1)).ok
