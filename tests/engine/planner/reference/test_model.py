"""Models, machines, jobs and policies: what they derive, and what they refuse."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, UnsupportedModelError
from engine.planner.reference import model as models
from engine.planner.reference.model import OPT_6_7B, OPT_30B, OPT_175B, T4, Fractions, Job, PaperModel, Policy
from engine.spec import ModelSpec

TinyModel = Callable[[str], Path]
ON_DEVICE = Fractions(1, 0, 0, 1, 0, 0, 1, 0, 0)


@pytest.mark.parametrize(
    ("model", "billions"), [(OPT_6_7B, 6.44), (OPT_30B, 29.6), (OPT_175B, 173.9)], ids=lambda value: str(value)[:20]
)
def test_the_layers_have_the_parameters_of_the_model_less_its_embedding(model: PaperModel, billions: float) -> None:
    assert model.layer_bytes * model.n_layers / 2 == pytest.approx(billions * 1e9, rel=0.01)


def test_every_model_of_the_family_has_heads_of_equal_size_and_a_fourfold_mlp() -> None:
    family = [value for value in vars(models).values() if isinstance(value, PaperModel)]
    assert len(family) == 7
    for model in family:
        assert model.h2 == 4 * model.h1
        assert model.h1 / model.n_heads in (64, 80, 128)


def test_a_checkpoint_like_opt_has_its_shapes_taken(tiny_model: TinyModel) -> None:
    spec = ModelSpec.from_directory(tiny_model("opt"))
    made = PaperModel.from_spec(spec)
    assert made == PaperModel("opt", spec.n_layers, spec.hidden_size, spec.mlp_size, spec.n_heads)
    assert PaperModel.from_spec(spec, name="mine").name == "mine"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_kv_heads": 1}, "1 KV heads for 4 query heads"),
        ({"gated_mlp": True}, "a gated MLP"),
        ({"head_dim": 24}, "heads of 96 elements in all on a hidden size of 64"),
        ({"windows": (None, 16, None)}, "sliding windows"),
        ({"n_kv_heads": 1, "gated_mlp": True}, "1 KV heads for 4 query heads, a gated MLP. Give a model like OPT"),
    ],
)
def test_what_the_formulas_do_not_cover_is_refused_by_name(
    tiny_model: TinyModel, changes: dict[str, Any], words: str
) -> None:
    spec = replace(ModelSpec.from_directory(tiny_model("opt")), **changes)
    with pytest.raises(UnsupportedModelError, match=words):
        PaperModel.from_spec(spec)


def test_the_machine_is_the_papers() -> None:
    assert T4.ctog_bdw == pytest.approx(13.84e9, rel=1e-3)
    assert [T4.capacity(tier) / 2**30 for tier in ("device", "host", "disk")] == [16, 208, 1500]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Job(0, 32), "s is 0; it must be a whole number of at least 1: give the prompts' length"),
        (lambda: Job(512, -1), "n is -1; it must be .* at least 1: give the tokens to generate"),
        (lambda: Job(512.0, 1), r"s is 512\.0; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: Job(True, 1), "s is True"),
        (lambda: replace(OPT_6_7B, h1=0), "h1 is 0"),
        (lambda: replace(T4, dtoc_bdw=0), "dtoc_bdw of .* is 0; it must be a number above 0"),
        (lambda: replace(T4, cpu_flops=float("nan")), "cpu_flops of .* is nan"),
        (lambda: replace(T4, host_bytes=-1), "host_bytes of .* is -1"),
        (lambda: Policy(0, 1, ON_DEVICE), "gbs is 0; .* at least 1: give the sequences of a GPU batch"),
        (lambda: Policy(1, 0, ON_DEVICE), "n_batches is 0; .* at least 1"),
        (lambda: Policy(1, 1, replace(ON_DEVICE, wc=0.1)), r"fractions of the weights are \(1, 0\.1, 0\); .* sum 1"),
        (lambda: Policy(1, 1, replace(ON_DEVICE, cg=1.5, cc=-0.5)), "fractions of the KV cache .* between 0 and 1"),
        (lambda: Policy(1, 1, replace(ON_DEVICE, hg=float("nan"))), "fractions of the activations"),
        (lambda: Policy.from_percent(1, 1, 50, 60, 0, 0, 0, 0), "fractions of the weights"),
        (lambda: Policy.from_percent(1, 1, 100, 0, 100), "percent has 3 numbers; it must have 6"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_policy_in_percent_leaves_the_rest_to_the_disk() -> None:
    policy = Policy.from_percent(48, 3, 20, 50, 0, 90, 0, 100)
    assert policy.fractions == Fractions(0.2, 0.5, 0.3, 0.0, 0.9, 0.1, 0.0, 1.0, 0.0)
    assert policy.block_size == 144


def test_a_machine_without_a_disk_is_one() -> None:
    assert replace(T4, disk_bytes=0).capacity("disk") == 0
