"""The engine on its own thread: order of arrival, overload, cancellation, faults and shutdown."""

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineDeadError, InvalidRequestError, OverloadedError
from engine.loop import EngineLoop
from engine.request import Delta, Request, SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def loop(tiny_model: Callable[[str], Path]) -> Iterator[EngineLoop]:
    config = EngineConfig(str(tiny_model("llama")), dtype="float32", max_sequences=2, max_queued=3)
    made = EngineLoop(Engine.load(config))
    made.start()
    yield made
    made.close()


class Inbox:
    """Collects the deltas of one request."""

    def __init__(self) -> None:
        self.deltas: queue.Queue[Delta] = queue.Queue()

    def __call__(self, delta: Delta) -> None:
        self.deltas.put(delta)

    def last(self) -> Delta:
        while True:
            delta = self.deltas.get(timeout=30)
            if delta.finish_reason:
                return delta


def test_requests_of_many_threads_all_finish(loop: EngineLoop) -> None:
    inboxes = []
    for i in range(4):
        inboxes.append(Inbox())
        loop.submit(Request(f"r{i}", (5, 6, 7 + i), SHORT), inboxes[-1])
    assert [inbox.last().finish_reason for inbox in inboxes] == ["length"] * 4


def test_a_full_queue_refuses_one_more_request(loop: EngineLoop) -> None:
    def submit_30() -> None:
        for i in range(30):
            loop.submit(Request(f"r{i}", (5, 6), LONG), Inbox())

    with pytest.raises(OverloadedError, match="limit is 3") as refusal:
        submit_30()
    assert refusal.value.retry_after_s > 0
    for i in range(30):
        loop.cancel(f"r{i}")


def test_a_request_id_in_use_is_refused_and_the_first_request_goes_on(loop: EngineLoop) -> None:
    inbox = Inbox()
    loop.submit(Request("twice", (5, 6), LONG), inbox)
    with pytest.raises(InvalidRequestError, match="twice"):
        loop.submit(Request("twice", (5, 6), SHORT), Inbox())
    loop.cancel("twice")
    assert inbox.last().finish_reason == "cancelled"


def test_cancelling_takes_effect_before_the_next_sweep(loop: EngineLoop) -> None:
    inbox = Inbox()
    loop.submit(Request("gone", (5, 6), LONG), inbox)
    inbox.deltas.get(timeout=30)
    loop.cancel("gone")
    assert inbox.last().finish_reason == "cancelled"
    after = Inbox()
    loop.submit(Request("next", (5, 6), SHORT), after)
    assert after.last().finish_reason == "length"
    assert loop.stats().cancelled_requests == 1


def test_a_fault_ends_every_request_with_the_reason(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a cosmic ray")

    inboxes = [Inbox(), Inbox(), Inbox()]
    monkeypatch.setattr(loop.engine, "step", broken)
    for i, inbox in enumerate(inboxes):
        loop.submit(Request(f"r{i}", (5, 6), LONG), inbox)
    last = inboxes[0].last()
    assert last.finish_reason == "error"
    assert "cosmic ray" in str(last.error)
    loop._thread.join(timeout=10)
    assert not loop.alive
    with pytest.raises(EngineDeadError, match="cosmic ray"):
        loop.submit(Request("late", (5,), SHORT), Inbox())


def test_closing_drains_what_can_be_finished_in_time(loop: EngineLoop) -> None:
    inbox = Inbox()
    loop.submit(Request("drained", (5, 6), SHORT), inbox)
    loop.close(drain_s=30)
    assert inbox.last().finish_reason == "length"


def test_closing_without_time_ends_requests_with_a_reason(loop: EngineLoop) -> None:
    inbox = Inbox()
    loop.submit(Request("cut", (5, 6), LONG), inbox)
    inbox.deltas.get(timeout=30)
    loop.close()
    last = inbox.last()
    assert last.finish_reason == "error"
    assert "shut down" in str(last.error)
