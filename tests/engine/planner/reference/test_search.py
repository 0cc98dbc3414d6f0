"""The search: its optima are those of the same programmes written for scipy, and its answers are what fits."""

from dataclasses import replace
from typing import Any

import cvxpy as cp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from engine.config import TIERS
from engine.errors import ConfigError, HeliosError, OutOfMemoryError
from engine.planner.reference.cost import evaluate
from engine.planner.reference.model import GB, OPT_1_3B, OPT_30B, OPT_175B, T4, Fractions, Job, Options, Policy
from engine.planner.reference.search import Programme, Solution, batch_sizes, search, solve
from tests.engine.planner.reference.cases import RATES, Case, random_case
from tests.engine.planner.reference.oracle import least_latency

seeds = st.integers(0, 10**6)
PRECISION = 1e-6
SMALL_T4 = replace(T4, device_bytes=2.5 * GB, host_bytes=3 * GB, disk_bytes=2 * GB)


def optimum(case: Case) -> Solution | None:
    return solve(case.model, case.hardware, case.job, case.gbs, case.n_batches, case.options)


def test_a_hundred_optima_are_those_of_an_independent_formulation() -> None:
    rng = np.random.default_rng(2303)
    feasible = 0
    for number in range(100):
        case = random_case(rng)
        found, expected = optimum(case), least_latency(case)
        assert (found is None) == (expected is None), f"case {number}: {case}"
        if found is not None:
            feasible += 1
            assert found.cost.latency_s == pytest.approx(expected, rel=PRECISION), f"case {number}: {case}"
    assert 40 <= feasible <= 90, "both kinds of cases are there"


@settings(max_examples=60, deadline=None)
@given(seed=seeds)
def test_a_solution_fits_every_tier_and_its_fractions_sum_to_one(seed: int) -> None:
    case = random_case(np.random.default_rng(seed))
    found = optimum(case)
    if found is None:
        return
    for triple in found.policy.fractions.triples().values():
        assert sum(triple) == pytest.approx(1, abs=1e-12)
        assert min(triple) >= 0
    for tier in TIERS:
        capacity = case.hardware.capacity(tier)
        assert found.cost.peak_bytes(tier) <= capacity * (1 + PRECISION) + GB * 1e-6


@settings(max_examples=40, deadline=None)
@given(seed=seeds, rate=st.sampled_from(RATES), times=st.floats(1, 100))
def test_a_faster_link_or_processor_never_lowers_the_optimum(seed: int, rate: str, times: float) -> None:
    case = random_case(np.random.default_rng(seed))
    faster = case._replace(hardware=replace(case.hardware, **{rate: getattr(case.hardware, rate) * times}))
    before, after = optimum(case), optimum(faster)
    assert (before is None) == (after is None)
    if before is not None and after is not None:
        assert after.throughput >= before.throughput * (1 - PRECISION)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, more=st.integers(1, 100))
def test_more_tokens_take_longer(seed: int, more: int) -> None:
    case = random_case(np.random.default_rng(seed))
    before = optimum(case)
    after = optimum(case._replace(job=replace(case.job, n=case.job.n + more)))
    if after is not None:
        assert before is not None, "what fits the longer job fits the shorter"
        assert after.cost.latency_s > before.cost.latency_s


@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_no_policy_that_fits_is_faster_than_the_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    found = optimum(case)
    if found is None:
        return
    for _ in range(20):
        parts = rng.dirichlet(np.full(3, 0.5), size=3).ravel().tolist()
        policy = Policy(case.gbs, case.n_batches, Fractions(*parts))
        cost = evaluate(case.model, case.hardware, case.job, policy, case.options)
        if not cost.overfull(case.hardware):
            assert cost.throughput <= found.throughput * (1 + PRECISION)


@pytest.mark.parametrize("options", [Options(), Options(overlap=False), Options(delegate=False), Options(True, True)])
def test_a_search_has_every_shape_that_fits_and_the_fastest_first(options: Options) -> None:
    job, sizes, most = Job(256, 16), [1, 2, 4, 8, 16, 32, 64, 128], 5
    found = search(OPT_1_3B, SMALL_T4, job, options, gbs=sizes, max_batches=most)
    programme = Programme(OPT_1_3B, SMALL_T4, job, options)
    each = {(gbs, n): programme.solve(gbs, n) for gbs in sizes for n in range(1, most + 1)}
    fitting = {shape: solution for shape, solution in each.items() if solution is not None}
    assert 0 < len(fitting) < len(each), "some shapes fit, and some do not"
    assert {(s.policy.gbs, s.policy.n_batches) for s in found.solutions} == set(fitting)
    throughputs = [solution.throughput for solution in found.solutions]
    assert throughputs == pytest.approx(sorted(throughputs, reverse=True))
    assert found.best.throughput == pytest.approx(max(s.throughput for s in fitting.values()))
    assert found.runners_up == found.solutions[1:]


@pytest.mark.parametrize("model", [OPT_30B, OPT_175B])
def test_the_search_beats_simple_policies_that_fit(model: Any) -> None:
    job = Job(512, 32)
    best = search(model, T4, job, gbs=[8, 16, 32], max_batches=8).best
    for percent in ((0, 0, 0, 0, 0, 0), (0, 50, 0, 0, 0, 100), (0, 100, 0, 100, 0, 100), (5, 50, 0, 50, 0, 100)):
        for gbs, n_batches in ((8, 1), (32, 4), (32, 8)):
            cost = evaluate(model, T4, job, Policy.from_percent(gbs, n_batches, *percent))
            assert cost.overfull(T4) or cost.throughput <= best.throughput * (1 + PRECISION)


def test_batch_sizes_are_multiples_of_four_and_the_two_smallest() -> None:
    assert batch_sizes(13) == [1, 2, 4, 8, 12]
    assert batch_sizes(1) == [1]
    assert batch_sizes()[-1] == 256


def test_progress_counts_up_to_the_number_of_shapes() -> None:
    seen: list[tuple[int, int, float]] = []

    def report(done: int, total: int, best: Solution | None) -> None:
        seen.append((done, total, best.throughput if best else 0.0))

    found = search(OPT_1_3B, SMALL_T4, Job(256, 16), gbs=[16, 4, 64], max_batches=4, progress=report)
    assert [total for _, total, _ in seen] == [12] * len(seen)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert [best for _, _, best in seen] == sorted(best for _, _, best in seen)
    assert seen[-1] == (12, 12, pytest.approx(found.best.throughput))


def test_of_equally_fast_blocks_the_smallest_is_best() -> None:
    """Where everything fits the device and is bound by its products, a larger block is no faster."""
    found = search(OPT_1_3B, T4, Job(16, 2), gbs=[1, 2, 4], max_batches=3)
    assert found.best.throughput == pytest.approx(found.solutions[-1].throughput)
    sizes = [solution.policy.block_size for solution in found.solutions]
    assert sizes == sorted(sizes)


def test_what_does_not_fit_has_no_solution() -> None:
    assert solve(OPT_30B, replace(T4, device_bytes=GB), Job(512, 32), 4, 1) is None
    assert solve(OPT_30B, replace(T4, disk_bytes=0), Job(512, 32), 64, 20) is None
    with pytest.raises(OutOfMemoryError, match=r"OPT-30B .* 512 tokens .* 1\.0 GiB of device, 208\.0 GiB.*; give"):
        search(OPT_30B, replace(T4, device_bytes=GB), Job(512, 32))


def test_a_solver_that_gives_up_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(*_: Any, **__: Any) -> None:
        raise cp.SolverError("numerical trouble")

    monkeypatch.setattr(cp.Problem, "solve", give_up)
    with pytest.raises(HeliosError, match=r"gives up on 3 batches of 2 \(numerical trouble\); .* Check them"):
        solve(OPT_1_3B, T4, Job(16, 16), 2, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gbs": [0]}, "gbs is 0; it must be a whole number of at least 1"),
        ({"gbs": [4.0]}, r"gbs is 4\.0"),
        ({"gbs": []}, "gbs has no batch size; it must have at least 1"),
        ({"max_batches": 0}, "max_batches is 0; it must be a whole number"),
    ],
)
def test_a_search_over_nothing_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        search(OPT_1_3B, T4, Job(16, 16), **arguments)


@pytest.mark.parametrize(("gbs", "n_batches"), [(0, 1), (1, 0), (-4, 1), (2.5, 1)])
def test_a_shape_that_makes_no_sense_is_refused(gbs: Any, n_batches: Any) -> None:
    with pytest.raises(ConfigError, match="it must be a whole number of at least 1: give"):
        solve(OPT_1_3B, T4, Job(16, 16), gbs, n_batches)
