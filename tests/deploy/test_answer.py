import asyncio

import pytest

from deploy.http.admission import Slots
from deploy.http.answer import gather
from deploy.http.merge import merge
from deploy.openai.errors import RequestTimeoutError
from engine.errors import EngineDeadError, InvalidRequestError, OutOfMemoryError, OverloadedError
from engine.request import Delta, Usage


def far():
    return asyncio.get_running_loop().time() + 60


class Source:
    """Counts up, and notes that it was closed."""

    def __init__(self, items, failure=None, forever=False):
        self.closed = False
        self.stream = self._run(items, failure, forever)

    async def _run(self, items, failure, forever):
        try:
            for item in items:
                yield item
                await asyncio.sleep(0)
            if failure:
                raise failure
            if forever:
                await asyncio.Event().wait()
        finally:
            self.closed = True


async def test_streams_are_read_together_each_in_its_order():
    sources = [Source("abc"), Source("xy")]
    items = [item async for item in merge([s.stream for s in sources], far(), 60)]
    assert [item for index, item in items if index == 0] == list("abc")
    assert [item for index, item in items if index == 1] == list("xy")
    assert [index for index, _ in items[:4]] == [0, 1, 0, 1]


async def test_closing_the_whole_closes_each():
    sources = [Source("a", forever=True), Source("b", forever=True)]
    merged = merge([s.stream for s in sources], far(), 60)
    await anext(merged)
    await merged.aclose()
    assert [s.closed for s in sources] == [True, True]


async def test_what_one_stream_raises_ends_the_whole():
    sources = [Source("a", OutOfMemoryError("full")), Source("b", forever=True)]
    with pytest.raises(OutOfMemoryError):
        async for _ in merge([s.stream for s in sources], far(), 60):
            pass
    assert sources[1].closed


async def test_the_deadline_names_the_limit_and_closes_the_streams():
    source = Source("a", forever=True)
    with pytest.raises(RequestTimeoutError, match=r"0\.01 s \(http\.request_timeout_s\)"):
        async for _ in merge([source.stream], asyncio.get_running_loop().time() + 0.01, 0.01):
            pass
    assert source.closed


def test_slots_are_held_and_given_back():
    slots = Slots(3)
    with slots.take(2), pytest.raises(OverloadedError, match="2 of 3") as caught, slots.take(2):
        pass
    assert caught.value.retry_after_s > 0
    with slots.take(3):
        assert slots.taken == 3
    assert slots.taken == 0


def test_more_than_all_slots_are_no_matter_of_waiting():
    with pytest.raises(InvalidRequestError, match="4 prompts"), Slots(3).take(4):
        pass


async def deltas(*items):
    for item in items:
        yield item


def delta(text, finish=None, usage=(3, 1)):
    return Delta("r", (), text, Usage(*usage), finish)


async def test_choices_are_gathered_by_index():
    choices, usage = await gather(
        deltas((1, delta("x", "stop")), (0, delta("a")), (0, delta("b", "length", (3, 2)))), 2
    )
    assert [(c.text, c.finish_reason) for c in choices] == [("ab", "length"), ("x", "stop")]
    assert usage == Usage(6, 3)


async def test_a_choice_without_a_reason_is_a_failure():
    with pytest.raises(EngineDeadError, match=r"\[1\]"):
        await gather(deltas((0, delta("a", "stop")), (1, delta("b"))), 2)
