"""The cost model: terms and bytes worked out by hand, and the same formulas for floats and for cvxpy."""

from dataclasses import replace
from typing import Any

import cvxpy as cp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from engine.config import TIERS
from engine.planner.reference.cost import PHASES, Block, Cost, evaluate, memory, terms
from engine.planner.reference.model import COMPRESSED, PAPER, Fractions, Options, Policy
from tests.engine.planner.reference.cases import TOY, TOY_JOB, TOY_MACHINE, random_case

POLICY = Policy(gbs=2, n_batches=5, fractions=Fractions(0.5, 0.25, 0.25, 0.2, 0.5, 0.3, 0.5, 0.4, 0.1))
# Bytes of one layer, by hand: 384 of weights, and of the block of 10: 640 of KV after prefill, 800 read in decode,
# 160 written; activations 240 in prefill, 80 in decode.


def cost(options: Options = PAPER, policy: Policy = POLICY) -> Cost:
    return evaluate(TOY, TOY_MACHINE, TOY_JOB, policy, options)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("ctog", (0.5 * 384 + 0.5 * 240) / 2),
        ("gtoc", 0.8 * 640 / 4 + 0.5 * 240 / 8),
        ("dtoc", (0.25 * 384 + 0.1 * 240) / 5),
        ("ctod", 0.3 * 640 / 16 + 0.1 * 240 / 3),
        ("comp", 11520 / 100 + 1440 / 10),
    ],
)
def test_prefill_terms_by_hand(name: str, seconds: float) -> None:
    assert cost().prefill.concurrent()[name] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("ctog", (0.5 * 384 + 0.5 * 80) / 2),
        ("gtoc", 0.5 * 80 / 8),
        ("dtoc", (0.3 * 800 + 0.25 * 384 + 0.1 * 80) / 5),
        ("ctod", (0.3 * 160 + 0.1 * 80) / 3),
        ("comp", 3840 / 50 + 0.2 * 800 / 8 + 0.8 * 800 / 20),
    ],
)
def test_decode_terms_by_hand(name: str, seconds: float) -> None:
    assert cost().decode.concurrent()[name] == pytest.approx(seconds)


def test_device_and_host_computation_are_told_apart() -> None:
    assert cost().decode.gpu_comp == pytest.approx(3840 / 50 + 0.2 * 800 / 8)
    assert cost().decode.cpu_comp == pytest.approx(0.8 * 800 / 20)
    assert cost().prefill.cpu_comp == 0


def test_the_slowest_term_is_the_layer_and_the_layers_are_the_job() -> None:
    found = cost()
    assert found.prefill_layer_s == pytest.approx(259.2)
    assert found.decode_layer_s == pytest.approx(128.8)
    assert found.latency_s == pytest.approx(259.2 * 2 + 128.8 * 3 * 2)
    assert found.throughput == pytest.approx(10 * 4 / 1291.2)
    assert found.decode_throughput == pytest.approx(10 / (128.8 * 2))


def test_without_overlap_the_terms_add_up() -> None:
    found = cost(Options(overlap=False))
    assert found.prefill_layer_s == pytest.approx(156 + 143 + 24 + 20 + 259.2)
    assert found.decode_layer_s == pytest.approx(116 + 5 + 68.8 + 56 / 3 + 128.8)


def test_without_delegation_the_kv_passes_to_the_device() -> None:
    decode = cost(Options(delegate=False)).decode
    assert decode.ctog == pytest.approx((0.5 * 384 + 0.5 * 80 + 0.8 * 800) / 2)
    assert decode.gpu_comp == pytest.approx(3840 / 50 + 800 / 8)
    assert decode.cpu_comp == 0
    assert decode.gtoc == cost().decode.gtoc
    assert decode.dtoc == cost().decode.dtoc


def test_four_bits_are_four_and_a_half_with_their_scales() -> None:
    assert pytest.approx(4.5 / 16) == COMPRESSED


def test_compression_changes_bytes_and_no_computation() -> None:
    weights, kv = cost(Options(compress_weights=True)), cost(Options(compress_kv=True))
    assert weights.prefill.ctog == pytest.approx((0.5 * 384 * 4.5 / 16 + 0.5 * 240) / 2)
    assert weights.decode.dtoc == pytest.approx((0.3 * 800 + 0.25 * 384 * 4.5 / 16 + 0.1 * 80) / 5)
    assert kv.prefill.gtoc == pytest.approx(0.8 * 640 * 4.5 / 16 / 4 + 0.5 * 240 / 8)
    assert kv.decode.dtoc == pytest.approx((0.3 * 800 * 4.5 / 16 + 0.25 * 384 + 0.1 * 80) / 5)
    assert kv.decode.ctod == pytest.approx((0.3 * 160 * 4.5 / 16 + 0.1 * 80) / 3)
    for found in (weights, kv):
        assert found.prefill.gpu_comp == cost().prefill.gpu_comp
        assert found.decode.concurrent()["comp"] == cost().decode.concurrent()["comp"]


HOME_KV = 4 * 7 * 4 * 10 * 2
BATCH_KV = 4 * 7 * 4 * 2


@pytest.mark.parametrize(
    ("phase", "tier", "home", "passing", "workspaces"),
    [
        ("prefill", "device", (0.5 * 768, 0.5 * 240, 0.2 * HOME_KV), 384 + 0.5 * 48,
         {"qkv": 192, "attention": 168, "embedding": 96, "mlp": 240}),
        ("decode", "device", (0.5 * 768, 0.5 * 80, 0.2 * HOME_KV), 384 + 0.5 * 16,
         {"qkv": 64, "attention": 0.2 * 2 * (8 + 56 + 28), "embedding": 32, "mlp": 80}),
        ("prefill", "host", (0.25 * 768, 0.4 * 240, 0.5 * HOME_KV), 96 + 0.1 * 48 + 0.3 * BATCH_KV, {}),
        ("decode", "host", (0.25 * 768, 0.4 * 80, 0.5 * HOME_KV), 96 + 0.1 * 16 + 0.3 * BATCH_KV,
         {"attention": 0.8 * 2 * (28 + 16)}),
        ("prefill", "disk", (0.25 * 768, 0.1 * 240, 0.3 * HOME_KV), 0, {}),
        ("decode", "disk", (0.25 * 768, 0.1 * 80, 0.3 * HOME_KV), 0, {}),
    ],
)  # fmt: skip
def test_memory_by_hand(
    phase: Any, tier: Any, home: tuple[float, ...], passing: float, workspaces: dict[str, float]
) -> None:
    held = cost().memory[phase][tier]
    assert (held.weights, held.activations, held.kv) == pytest.approx(home)
    assert held.passing == pytest.approx(passing)
    assert held.workspaces == pytest.approx(workspaces)
    assert max(held.peaks()) == pytest.approx(sum(home) + passing + max(workspaces.values(), default=0))


def test_without_delegation_the_device_holds_two_batches_of_passing_kv() -> None:
    with_it, without = cost().memory["decode"], cost(Options(delegate=False)).memory["decode"]
    assert without["device"].passing - with_it["device"].passing == pytest.approx(2 * 0.8 * BATCH_KV)
    assert without["device"].workspaces["attention"] == pytest.approx(2 * (8 + 56 + 28))
    assert not without["host"].workspaces


def test_compression_shrinks_what_is_stored_and_no_workspace() -> None:
    found = cost(Options(compress_weights=True, compress_kv=True))
    for phase in PHASES:
        for tier in TIERS:
            packed, plain = found.memory[phase][tier], cost().memory[phase][tier]
            assert packed.weights == pytest.approx(plain.weights * 4.5 / 16)
            assert packed.kv == pytest.approx(plain.kv * 4.5 / 16)
            assert packed.activations == plain.activations
            assert packed.workspaces == plain.workspaces


def test_the_peak_is_that_of_the_phase_that_holds_more() -> None:
    assert cost().peak_bytes("device") == pytest.approx(1600)
    assert cost().peak_bytes("host") == pytest.approx(1579.2)
    assert cost().peak_bytes("disk") == pytest.approx(888)


def test_tiers_that_are_too_small_are_named() -> None:
    assert cost().overfull(TOY_MACHINE) == []
    assert cost().overfull(replace(TOY_MACHINE, device_bytes=1599, disk_bytes=887)) == ["device", "disk"]


def test_a_job_of_one_token_is_prefill_alone() -> None:
    found = evaluate(TOY, TOY_MACHINE, replace(TOY_JOB, n=1), POLICY)
    assert found.latency_s == pytest.approx(259.2 * 2)


@pytest.mark.parametrize("seed", range(20))
def test_floats_arrays_and_cvxpy_expressions_give_the_same(seed: int) -> None:
    case = random_case(np.random.default_rng(seed))
    block = Block(case.model, case.hardware, case.job, case.gbs, case.n_batches, case.options)
    values = np.random.default_rng(seed).dirichlet(np.ones(3), size=3).ravel()
    symbols = [cp.Variable(value=value) for value in values]
    kinds = {
        "floats": Fractions(*values.tolist()),
        "arrays": Fractions(*np.stack([values, values], axis=1)),
        "expressions": Fractions(*symbols),
    }
    found = {name: np.array(_everything(block, fractions)) for name, fractions in kinds.items()}
    assert_allclose(found["expressions"], found["floats"], rtol=1e-12)
    assert_allclose(found["arrays"], found["floats"], rtol=1e-12)


def _everything(block: Block, fractions: Fractions[Any]) -> list[float]:
    """All times and peaks as numbers."""
    amounts = [
        amount
        for phase in PHASES
        for amount in (
            *terms(block, fractions, phase).layer_times(block.options.overlap),
            *(peak for held in memory(block, fractions, phase).values() for peak in held.peaks()),
        )
    ]
    return [float(np.ravel(amount.value if isinstance(amount, cp.Expression) else amount)[0]) for amount in amounts]
