from actors.stream import Ledger
from engine.errors import OverloadedError
from engine.request import Delta, SamplingParams, Token, Usage


def _delta(attempt, *ids):
    return Delta(attempt, tuple(Token(i, -1.0, 0.5) for i in ids), "x", Usage(2, len(ids)))


def test_a_stream_without_a_seed_is_given_one_to_be_resumed_with():
    assert Ledger.begin("r", "hi", SamplingParams()).params.seed is not None
    assert Ledger.begin("r", "hi", SamplingParams(seed=7)).params.seed == 7


def test_attempts_have_ids_of_their_own_and_deltas_the_streams():
    ledger = Ledger.begin("r", "hi", SamplingParams())
    first, second = ledger.next_attempt(), ledger.next_attempt()
    assert first != second
    assert {ledger.deliver(_delta(attempt, 5)).request_id for attempt in (first, second)} == {"r"}


def test_the_ledger_holds_what_is_needed_to_go_on():
    ledger = Ledger.begin("r", "hi", SamplingParams())
    ledger.opened((8, 9))
    ledger.deliver(_delta("r", 1, 2))
    ledger.deliver(_delta("r", 3))
    assert (ledger.prompt, ledger.tokens) == ((8, 9), [1, 2, 3])
    last = ledger.end(OverloadedError("no replica"))
    assert (last.finish_reason, last.usage) == ("error", Usage(2, 3))
