"""ModelActor as a plain object: what it does needs no cluster, save for reporting."""

import asyncio
import threading

import pytest

from actors import model as model_module
from actors.messages import Opened
from actors.model import ModelActor
from actors.reporter import Reporter
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError, EngineDeadError, InvalidRequestError, ModelNotFoundError
from engine.request import Request, SamplingParams
from engine.spec import Exit
from tests.actors.conftest import tiny_app
from tests.engine.exits.random_heads import add_heads
from tests.engine.tiny import save_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class SilentReporter:
    """Stands where the thread that talks to Ray does."""

    def __init__(self, *args):
        pass

    def start(self):
        pass

    stop = start


@pytest.fixture
async def actor(tiny, monkeypatch):
    monkeypatch.setattr(model_module, "Reporter", SilentReporter)
    actor = ModelActor("lab", tiny_app("lab", tiny).models[0], 0)
    yield actor
    await actor.close()


async def _drain(actor, owner, epoch):
    deltas = []
    while not deltas or deltas[-1].finish_reason is None:
        deltas += await actor.poll(owner, epoch)
    return deltas


async def test_a_completion_equals_the_engines_own(actor, engine_config):
    completion = await actor.generate("hello there", GREEDY)
    engine, deltas = Engine.load(engine_config), []
    engine.add(engine.prepare(Request("r", completion.prompt_ids, GREEDY), deltas.append))
    while engine.has_work:
        engine.step()
    assert [t.id for t in completion.tokens] == [t.id for delta in deltas for t in delta.tokens]
    assert completion.text == "".join(delta.text for delta in deltas)
    assert completion.finish_reason == "length"


async def test_an_actor_with_weights_and_kv_on_disk_says_the_same(actor, tiny, tmp_path):
    expected = await actor.generate("hello there", GREEDY)
    nowhere = {"weights": {"disk": ["embedding", "layers.0-2", "head"]}, "kv_tokens": 0, "kv_disk_tokens": 512}
    model = tiny_app("lab", tiny, offload_dir=str(tmp_path), **nowhere).models[0]
    offloaded = ModelActor("lab", model, 0)
    try:
        completion = await offloaded.generate("hello there", GREEDY)
        stats = await offloaded.stats()
    finally:
        await offloaded.close()
    assert [t.id for t in completion.tokens] == [t.id for t in expected.tokens]
    assert "kv" not in stats.memory, "none on the device"
    assert not list(tmp_path.iterdir())


async def test_a_stream_opens_with_the_prompts_ids_and_ends_with_a_reason(actor):
    messages = [message async for message in actor.stream("hello", GREEDY, request_id="r")]
    opened, *deltas = messages
    assert isinstance(opened, Opened)
    assert opened.prompt_ids == await actor.tokenize("hello")
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "length"
    assert sum(len(delta.tokens) for delta in deltas) == 12


async def test_closing_a_stream_cancels_its_sequence(actor):
    stream = actor.stream("hello", SamplingParams(ignore_eos=True))
    await anext(stream)
    await anext(stream)
    await stream.aclose()
    await actor.generate("hello", GREEDY)  # a few more sweeps
    stats = await actor.stats()
    assert (stats.cancelled_requests, stats.running) == (1, 0)


async def test_a_resumed_sequence_goes_on_where_the_first_stopped(actor):
    sampled = SamplingParams(seed=5, max_tokens=12, ignore_eos=True)
    whole = await actor.generate("hello", sampled)
    ids = [token.id for token in whole.tokens]
    opened = await actor.begin("me", whole.prompt_ids, sampled, "again", ids[:7])
    rest = await _drain(actor, "me", opened.epoch)
    assert [token.id for delta in rest for token in delta.tokens] == ids[7:]
    assert whole.text.endswith("".join(delta.text for delta in rest))


async def test_one_poll_brings_the_deltas_of_all_of_an_owners_sequences(actor):
    opened = [await actor.begin("me", "hello", GREEDY, f"r{i}") for i in range(4)]
    finished = 0
    async with asyncio.timeout(10):
        while finished < 4:
            finished = (await actor.stats()).finished_requests
            await asyncio.sleep(0.01)  # once more after the last, which is delivered just after it is counted
    deltas = await actor.poll("me", opened[0].epoch)
    assert [delta.request_id for delta in deltas] == ["r0", "r1", "r2", "r3"]
    assert [len(delta.tokens) for delta in deltas] == [12] * 4
    assert all(delta.finish_reason == "length" for delta in deltas)


async def test_polling_for_another_life_is_told_that_the_sequences_are_gone(actor):
    opened = await actor.begin("me", "hello", GREEDY, "r")
    with pytest.raises(EngineDeadError):
        await actor.poll("me", opened.epoch - 1)
    with pytest.raises(EngineDeadError):
        await actor.poll("somebody else", opened.epoch)


async def test_sequences_of_an_owner_that_is_gone_are_cancelled(actor, monkeypatch):
    monkeypatch.setattr(model_module, "LEASE_S", 0.2)
    opened = await actor.begin("me", "hello", SamplingParams(ignore_eos=True), "r")
    async with asyncio.timeout(10):
        while (await actor.stats()).cancelled_requests == 0:
            await asyncio.sleep(0.05)
    with pytest.raises(EngineDeadError):
        await actor.poll("me", opened.epoch)


async def test_a_refused_request_leaves_nothing_behind(actor):
    with pytest.raises(InvalidRequestError, match="top_p"):
        await actor.generate("hello", {"top_p": 2})
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        await actor.generate([], GREEDY)
    assert (await actor.stats()).running == 0


async def test_health_is_a_token_generated_and_no_evidence_for_the_router(actor):
    health = await actor.check()
    assert (health.ok, health.reason) == (True, "generated one token")
    assert actor._report().counters[3].requests == 0


async def test_a_model_that_cannot_generate_is_not_healthy_and_says_why(actor, monkeypatch):
    def broken(sweep):
        raise CheckpointError("weights.safetensors cannot be read")

    monkeypatch.setattr(actor._loop.engine._parts.executor, "run", broken)
    health = await actor.check()
    assert (health.ok, health.reason) == (False, "weights.safetensors cannot be read")
    monkeypatch.undo()
    assert (await actor.check()).ok


async def test_counters_are_reported_by_depth(actor):
    completion = await actor.generate("hello", GREEDY)
    async with asyncio.timeout(10):  # the last token is delivered before its sweep is counted
        while (counters := actor._report().counters[3]).tokens < 12:
            await asyncio.sleep(0.01)
    assert (counters.requests, counters.tokens, counters.decode_tokens) == (1, 12, 11)
    assert counters.sum_logprob == pytest.approx(sum(token.logprob for token in completion.tokens))
    assert 0 < counters.ttft_s < 10


async def test_a_model_that_cannot_be_loaded_says_so_to_every_call():
    config = tiny_app("lab", "/no/such/model").models[0]
    actor = ModelActor("lab", config, 0)
    assert await actor.fingerprint() == config.fingerprint()
    for call in (actor.ready(), actor.generate("hello"), actor.stats(), actor.check()):
        with pytest.raises(ModelNotFoundError, match="/no/such/model"):
            await call


async def test_a_dead_engine_ends_its_requests_and_is_noticed(actor, monkeypatch):
    def fault():
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(actor._loop.engine, "step", fault)
    with pytest.raises(EngineDeadError, match="the device is gone"):
        await actor.generate("hello", GREEDY)
    died = threading.Event()
    Reporter("lab", actor._report, lambda: actor._loop.alive, died.set).start()
    assert await asyncio.to_thread(died.wait, 10)


async def test_the_depth_changes_and_the_model_is_parked(tmp_path, monkeypatch):
    monkeypatch.setattr(model_module, "Reporter", SilentReporter)
    directory = save_tiny(tmp_path / "model")
    add_heads(directory, [Exit(1, "norm")])
    config = tiny_app("lab", directory, depth=1).models[0]
    actor = ModelActor("lab", config, 0)
    try:
        assert {token.depth for token in (await actor.generate("hello", GREEDY)).tokens} == {1}
        assert await actor.change_depth(None) == 3
        assert {token.depth for token in (await actor.generate("hello", GREEDY)).tokens} == {3}
        with pytest.raises(ConfigError, match="depth is 2, where this model has no exit"):
            await actor.change_depth(2)
        await actor.park()
        assert (await actor.check()).reason == "parked"
        waiting = asyncio.create_task(actor.generate("hello", GREEDY))
        assert await actor.change_depth(1) == 1
        assert {token.depth for token in (await waiting).tokens} == {1}
    finally:
        await actor.close()
