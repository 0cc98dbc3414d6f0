import pytest

from engine.errors import ModelNotFoundError, OverloadedError
from router.core import GRACE_S, SILENCE_S, Router, Served
from router.pht import PerformanceTable
from router.report import Counters, Report


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def router(clock):
    return Router([Served("a", "x", 2), Served("b", "y", 1)], "throughput", PerformanceTable(), clock)


def _report(model="a", replica=0, epoch=1, running=0, waiting=0, **sums):
    return Report(model, replica, epoch, running, waiting, {30: Counters(**sums)} if sums else {})


def _states(router, model="a"):
    status = next(status for status in router.snapshot().models if status.model == model)
    return [replica.state for replica in status.replicas]


def test_replicas_load_until_they_report(router):
    assert _states(router) == ["loading", "loading"]
    router.report(_report(replica=1))
    assert _states(router) == ["loading", "ready"]


def test_unknown_models_are_refused_with_what_there_is(router):
    with pytest.raises(ModelNotFoundError, match="'c' is not served here; ask for one of: a, b, auto"):
        router.assign("c", "r")


@pytest.mark.parametrize("model", ["a", "auto"])
def test_nothing_ready_is_said_and_can_be_tried_again(router, model):
    with pytest.raises(OverloadedError) as caught:
        router.assign(model, "r")
    assert caught.value.retry_after_s > 0


def test_a_burst_spreads_over_replicas_before_they_report_it(router):
    router.report(_report(replica=0))
    router.report(_report(replica=1))
    assert [router.assign("a", f"r{i}").replica for i in range(4)] == [0, 1, 0, 1]


def test_the_replica_with_the_fewest_requests_is_taken(router):
    router.report(_report(replica=0, running=3, waiting=2))
    router.report(_report(replica=1, running=4))
    decision = router.assign("a", "r")
    assert decision.replica == 1
    assert "fewest requests (4)" in decision.reason


def test_auto_tries_only_what_is_ready(router):
    router.report(_report("b"))
    assert router.assign("auto", "r").model == "b"


def test_avoided_replicas_are_taken_only_when_nothing_else_is_ready(router):
    router.report(_report(replica=0))
    assert router.assign("a", "r", avoid=[("a", 0)]).replica == 0
    router.report(_report(replica=1, running=9))
    assert router.assign("a", "r", avoid=[("a", 0)]).replica == 1


def test_a_failed_replica_is_ready_again_with_its_next_life(router, clock):
    router.report(_report(epoch=1))
    router.failed("a", 0, epoch=1)
    router.report(_report(epoch=1))  # was on its way when the replica died
    assert _states(router)[0] == "dead"
    router.report(_report(epoch=2))
    router.failed("a", 0, epoch=1)  # old news
    assert _states(router)[0] == "ready"


def test_a_replica_wrongly_found_dead_comes_back(router, clock):
    router.report(_report())
    router.failed("a", 0, epoch=1)
    clock.now_s += GRACE_S
    router.report(_report())
    assert _states(router)[0] == "ready"


def test_silence_is_death_until_the_next_report(router, clock):
    router.report(_report())
    clock.now_s += SILENCE_S + 1
    assert _states(router)[0] == "dead"
    router.report(_report())
    assert _states(router)[0] == "ready"


def test_reports_reach_the_table_and_strangers_do_not(router):
    assert router.report(_report(requests=1, tokens=5, busy_s=1.0))
    assert not router.report(_report("stranger", requests=1, tokens=5))
    assert not router.report(_report(replica=7, requests=1, tokens=5))
    assert router.table.figures("a").throughput == 5.0
    assert ("stranger", 30) not in router.table.sums


def test_recent_decisions_are_kept_with_their_reasons(router):
    router.report(_report())
    decision = router.assign("a", "r")
    assert router.snapshot().recent == (decision,)
    assert (decision.request_id, decision.reason) == ("r", "asked for by name")


def test_lives_after_the_first_are_counted_as_restarts(router):
    def restarts():
        return router.snapshot().models[0].replicas[0].restarts

    router.report(_report(epoch=5))
    router.report(_report(epoch=5, running=1))
    assert restarts() == 0
    router.report(_report(epoch=6))
    router.failed("a", 0, 6)
    assert restarts() == 1
    router.report(_report(epoch=7))
    assert restarts() == 2
