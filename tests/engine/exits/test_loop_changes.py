"""Changes of depth on a thread of their own, while requests come and go."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError, EngineDeadError
from engine.loop import EngineLoop
from engine.request import Completion, Request, SamplingParams
from engine.spec import Exit
from engine.transition import Transition
from tests.engine.test_loop import Inbox
from tests.engine.test_parity import random_tokens

from .random_heads import WIDTH, Oracle, add_heads
from .test_transitions import check

EXITS = [Exit(1, "adapter", WIDTH), Exit(2, "norm")]
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
WAIT_S = 60


@pytest.fixture
def model(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    copy = shutil.copytree(tiny_model("llama"), tmp_path / "llama")
    add_heads(copy, EXITS)
    return copy


@pytest.fixture
def serve(model: Path) -> Iterator[Callable[..., EngineLoop]]:
    made: list[EngineLoop] = []

    def start(**fields: Any) -> EngineLoop:
        fields = {"dtype": "float32", "threads": 1, "kv_tokens": 512, "depth": 1} | fields
        made.append(EngineLoop(Engine.load(EngineConfig(str(model), **fields))))
        made[-1].start()
        return made[-1]

    yield start
    for each in made:
        each.close()


def submit(loop: EngineLoop, count: int) -> list[tuple[Request, Inbox]]:
    sent = [(Request(f"r{i}", tuple(random_tokens(5 + 9 * i, seed=i)), GREEDY), Inbox()) for i in range(count)]
    for request, inbox in sent:
        loop.submit(request, inbox)
    return sent


def finished(sent: list[tuple[Request, Inbox]]) -> list[Completion]:
    done = []
    for request, inbox in sent:
        deltas = [inbox.deltas.get(timeout=WAIT_S)]
        while not deltas[-1].finish_reason:
            deltas.append(inbox.deltas.get(timeout=WAIT_S))
        done.append(Completion.gather(request, deltas))
    return done


@pytest.mark.parametrize("kept", [False, True])
def test_requests_go_on_through_changes(model: Path, serve: Callable[..., EngineLoop], kept: bool) -> None:
    loop = serve(keep_states=kept)
    sent = submit(loop, 3)
    futures = [loop.change_depth(depth) for depth in (3, 2, None, 1)]
    assert [future.result(WAIT_S) for future in futures] == [3, 2, 3, 1]
    done = finished(sent)
    check(Oracle(model, EXITS, add_heads(model, EXITS)), done)


def test_what_is_lacking_is_read_while_requests_go_on(
    serve: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = serve()
    may_load = threading.Event()
    load = Transition.load
    monkeypatch.setattr(Transition, "load", lambda self: (may_load.wait(WAIT_S), load(self)))
    future = loop.change_depth(None)
    done = finished(submit(loop, 2))  # all of it at the depth there is
    assert {token.depth for each in done for token in each.tokens} == {1}
    assert not future.done()
    may_load.set()
    assert future.result(WAIT_S) == 3 == loop.stats().depth


def test_a_parked_model_keeps_requests_waiting_and_wakes_up(model: Path, serve: Callable[..., EngineLoop]) -> None:
    loop = serve()
    assert loop.park().result(WAIT_S) == 0
    memory = loop.stats().memory
    assert memory.get("weights", 0) == memory.get("kv", 0) == 0
    sent = submit(loop, 2)
    assert loop.change_depth(2).result(WAIT_S) == 2
    done = finished(sent)
    assert {token.depth for each in done for token in each.tokens} == {2}


def test_a_change_that_fails_is_said_and_all_is_as_before(model: Path, serve: Callable[..., EngineLoop]) -> None:
    loop = serve()
    with pytest.raises(ConfigError, match="depth is 7"):
        loop.change_depth(7).result(WAIT_S)
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError):
        loop.change_depth(3).result(WAIT_S)
    assert loop.stats().depth == 1
    assert [each.finish_reason for each in finished(submit(loop, 2))] == ["length"] * 2


def test_an_order_that_is_taken_back_is_not_carried_out(
    serve: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = serve()
    begun, may_load = threading.Event(), threading.Event()
    load = Transition.load
    monkeypatch.setattr(Transition, "load", lambda self: (begun.set(), may_load.wait(WAIT_S), load(self)))
    first, second = loop.change_depth(None), loop.change_depth(2)
    assert begun.wait(WAIT_S)
    assert not first.cancel()
    assert second.cancel()
    may_load.set()
    assert first.result(WAIT_S) == 3
    assert [each.usage.depth for each in finished(submit(loop, 1))] == [3]


def test_closing_ends_changes_and_requests_of_a_parked_model(serve: Callable[..., EngineLoop]) -> None:
    loop = serve()
    loop.park().result(WAIT_S)
    sent = submit(loop, 1)
    loop.close(drain_s=WAIT_S)  # waits for nothing that cannot happen
    (done,) = finished(sent)
    assert done.finish_reason == "error"
    assert isinstance(done.error, EngineDeadError)
    with pytest.raises(EngineDeadError):
        loop.change_depth(2)


def test_closing_while_a_change_is_read(serve: Callable[..., EngineLoop], monkeypatch: pytest.MonkeyPatch) -> None:
    loop = serve()
    begun, may_load = threading.Event(), threading.Event()
    load = Transition.load
    monkeypatch.setattr(Transition, "load", lambda self: (begun.set(), may_load.wait(WAIT_S), load(self)))
    first, second = loop.change_depth(None), loop.change_depth(2)
    assert begun.wait(WAIT_S)
    closing = threading.Thread(target=loop.close)
    closing.start()
    may_load.set()
    closing.join(WAIT_S)
    outcomes = [future.exception(WAIT_S) for future in (first, second)]
    assert isinstance(outcomes[1], EngineDeadError)
    assert outcomes[0] is None or isinstance(outcomes[0], EngineDeadError)
