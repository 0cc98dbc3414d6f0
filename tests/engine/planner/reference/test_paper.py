"""The paper's figures beside the cost model's: how far each row is off, and what the model gets right all the same."""

from dataclasses import replace

import pytest

from engine.planner.reference.model import GB, OPT_30B, OPT_175B, T4, PaperHardware
from engine.planner.reference.paper import ABLATION, BASELINES, PIPELINE, TABLE, Row, predictions

FP16, FOUR_BITS = TABLE[:6], TABLE[6:]
DATA_SHEET = replace(T4, dtoc_bdw=2 * GB)
"""The T4's machine, with the disk read as fast as its data sheet has it."""


def within(row: Row, factor: float, hardware: PaperHardware = T4) -> bool:
    ratio = predictions([row], hardware)[0].ratio
    return 1 / factor <= ratio <= factor


@pytest.mark.parametrize(
    ("row", "factor"),
    list(zip(FP16, (2.5, 1.2, 4.5, 2.4, 1.35, 4.5), strict=True)),
    ids=[f"{row.model.name}-{row.s}" for row in FP16],
)
def test_fp16_rows_are_predicted_within_a_factor(row: Row, factor: float) -> None:
    assert within(row, factor)


def test_resident_models_are_predicted_too_fast() -> None:
    """The model has no term for reading the weights out of the device's own memory, which is what small batches do."""
    for prediction in (predictions(FP16)[0], predictions(FP16)[3]):
        assert prediction.ratio > 2
        times = prediction.cost.decode.concurrent()
        assert times.pop("comp") > 0
        assert set(times.values()) == {0}


def test_without_overlap_of_the_load_as_the_constants_were_fitted_opt_30b_is_predicted_well() -> None:
    for prediction in (predictions(FP16)[1], predictions(FP16)[4]):
        row, cost = prediction.row, prediction.cost
        added_s = row.model.n_layers * (row.job.n - 1) * cost.decode.ctog
        throughput = row.policy.block_size * row.job.n / (cost.latency_s + added_s)
        assert throughput == pytest.approx(row.throughput, rel=0.07)


def test_opt_175b_waits_for_the_disk_and_the_fitted_disk_is_slower_than_the_one_that_ran() -> None:
    for row in (FP16[2], FP16[5]):
        (prediction,) = predictions([row])
        assert prediction.cost.decode_layer_s == prediction.cost.decode.dtoc
        assert prediction.ratio < 0.25
        assert within(row, 1.2, DATA_SHEET)


def test_codes_are_predicted_too_fast_as_expanding_them_costs_nothing_in_the_model() -> None:
    for prediction in predictions(FOUR_BITS):
        assert 1.7 < prediction.ratio < 3.1


def test_the_papers_policies_fit_its_machine_by_the_formulas() -> None:
    for prediction in predictions((*TABLE, *ABLATION)):
        assert prediction.cost.overfull(T4) == []


@pytest.mark.parametrize("model", [OPT_30B, OPT_175B], ids=lambda model: model.name)
def test_every_ablation_is_predicted_to_cost_throughput_or_nothing(model: object) -> None:
    whole, *less = predictions([row for row in ABLATION if row.model == model])
    assert whole.row.label == "all"
    for prediction in less:
        assert prediction.cost.throughput <= whole.cost.throughput


def test_what_overlap_and_policy_are_worth_to_opt_30b_is_predicted() -> None:
    rows = {row.label: row for row in ABLATION if row.model == OPT_30B}
    assert within(rows["no overlap"], 1.05)
    assert within(rows["DeepSpeed's policy"], 1.15)


def test_every_row_has_its_prediction() -> None:
    found = predictions()
    assert [prediction.row for prediction in found] == list(TABLE)
    for prediction in found:
        assert prediction.ratio == pytest.approx(prediction.cost.throughput / prediction.row.throughput)


def test_all_figures_are_of_the_same_three_models() -> None:
    models = {row.model.name for row in TABLE}
    assert len(models) == 3
    assert models == {row.model.name for row in (*BASELINES, *PIPELINE)}
