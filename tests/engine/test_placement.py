"""Placement: names are taken at their word or refused by name, and what is chosen fits, spread over the sweep."""

from collections.abc import Mapping, Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from engine.config import TierName
from engine.errors import ConfigError
from engine.placement import fill, grouped, named
from engine.sizes import Sizes
from engine.spec import ModelSpec
from engine.units import Unit, units
from tests.engine.tiny import CONFIGS

SPECS = {name: ModelSpec.from_config(config.to_dict()) for name, config in CONFIGS.items()}
LLAMA, TIED, LAST = SPECS["llama"], SPECS["qwen2"], 2
DTYPE = torch.float32


def deep(layers: int, tied: bool = False) -> ModelSpec:
    config = CONFIGS["qwen2" if tied else "llama"].to_dict() | {"num_hidden_layers": layers}
    return ModelSpec.from_config(config | {"layer_types": ["full_attention"] * layers} if tied else config)


def resident_bytes(spec: ModelSpec, placement: Mapping[Unit, TierName]) -> int:
    return sum(Sizes(spec, DTYPE).matrices(unit) for unit, tier in placement.items() if tier == "device")


def test_every_way_of_naming_units_places_them() -> None:
    placement = named(LLAMA, {"device": ["layers.1.mlp", "head"], "host": ["layers.0-1.attention"], "disk": [
        "embedding", "layers.2", "layers.0.mlp"]})  # fmt: skip
    assert grouped(placement) == {
        "device": ["layers.1.mlp", "head"],
        "host": ["layers.0.attention", "layers.1.attention"],
        "disk": ["embedding", "layers.2.attention", "layers.2.mlp", "layers.0.mlp"],
    }


def test_a_range_names_both_its_ends() -> None:
    placement = named(LLAMA, {"disk": ["layers.0-2"], "device": ["embedding", "head"]})
    assert sum(tier == "disk" for tier in placement.values()) == 6


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@settings(max_examples=20)
@given(seed=st.randoms(use_true_random=False))
def test_what_grouped_writes_is_what_named_reads(spec: ModelSpec, seed: object) -> None:
    placement: dict[Unit, TierName] = {
        unit: seed.choice(("device", "host", "disk"))  # type: ignore[attr-defined]
        for unit in units(spec.n_layers)
    }
    if spec.tied:
        placement[Unit("head")] = placement[Unit("embedding")]
    assert named(spec, grouped(placement)) == placement


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"disk": ["layers.0-2", "embedding", "embedding", "head"]}, "'embedding' is placed on 'disk' and on 'disk'"),
        ({"disk": ["layers.0-2", "embedding"], "host": ["layers.1.mlp"]}, r"'layers.1.mlp' .*'disk' and on 'host'"),
        ({"disk": ["layers.0-1", "layers.1-2"]}, r"'layers.1.attention' is placed .*name it once"),
        ({"disk": ["layers.0-2", "embedding"]}, r"head \(1 units\) are placed nowhere; name a tier"),
        ({}, r"embedding, layers.0.attention, layers.0.mlp \(8 units\) are placed nowhere"),
        ({"disk": ["layers.3"]}, r"'layers.3' is outside the model's layers 0 to 2"),
        ({"disk": ["layers.0-3"]}, r"'layers.0-3' is outside the model's layers 0 to 2"),
        ({"disk": ["layers.2-1"]}, r"'layers.2-1'"),
        ({"disk": ["layers"]}, "'layers' is no unit; write embedding"),
        ({"disk": ["layers.-1"]}, "'layers.-1' is no unit"),
        ({"disk": ["layers.1.norm"]}, "'layers.1.norm' is no unit"),
        ({"disk": ["Layers.1"]}, "is no unit"),
        ({"disk": ["head.0"]}, "'head.0' is no unit"),
        ({"disk": ["layers.1 "]}, "is no unit"),
        ({"disk": [""]}, "'' is no unit"),
    ],
)
def test_a_name_that_cannot_be_placed_is_refused(given_: Mapping[TierName, Sequence[str]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        named(LLAMA, given_)


@pytest.mark.parametrize(("head", "embedding"), [("disk", "device"), ("device", "disk"), ("device", "host")])
def test_a_head_that_is_the_embedding_is_not_torn_from_it(head: TierName, embedding: TierName) -> None:
    layers: TierName = "host" if "host" not in (head, embedding) else "disk"
    with pytest.raises(ConfigError, match="head is its embedding; place both on the device, or both elsewhere"):
        named(TIED, {head: ["head"], embedding: ["embedding"], layers: ["layers.0-2"]})


def test_a_tied_head_and_embedding_may_be_on_two_tiers_below_the_device() -> None:
    named(TIED, {"disk": ["head", "layers.0-2"], "host": ["embedding"]})


@given(
    layers=st.integers(1, 40),
    tied=st.booleans(),
    share=st.floats(0, 1.2),
    dtype=st.sampled_from([DTYPE, torch.bfloat16]),
)
def test_what_is_filled_fits_and_leaves_no_room_for_one_more(
    layers: int, tied: bool, share: float, dtype: torch.dtype
) -> None:
    spec = deep(layers, tied)
    sizes = {unit: Sizes(spec, dtype).matrices(unit) for unit in units(layers)}
    room = int(share * sum(sizes.values()))
    placement = fill(Sizes(spec, dtype), room)
    assert list(placement) == units(layers)
    assert set(placement.values()) <= {"device", "disk"}
    held = sum(size for unit, size in sizes.items() if placement[unit] == "device")
    assert held <= room
    if tied:
        assert placement[Unit("head")] == placement[Unit("embedding")]
    others = [
        size for unit, size in sizes.items() if placement[unit] == "disk" and unit.kind not in ("embedding", "head")
    ]
    assert not others or min(others) > room - held


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_model_is_resident_as_soon_as_it_fits(spec: ModelSpec) -> None:
    whole = sum(Sizes(spec, DTYPE).matrices(unit) for unit in units(spec.n_layers))
    assert set(fill(Sizes(spec, DTYPE), whole).values()) == {"device"}
    assert "disk" in fill(Sizes(spec, DTYPE), whole - 1).values()


def test_without_room_all_is_on_disk() -> None:
    assert set(fill(Sizes(LLAMA, DTYPE), 0).values()) == {"disk"}


@given(share=st.floats(0.05, 0.95))
def test_what_is_on_disk_is_spread_over_the_sweep(share: float) -> None:
    """In every run of layers about the same share of the bytes comes from disk, so that the disk is never idle."""
    spec = deep(40)
    sizes = {unit: Sizes(spec, DTYPE).matrices(unit) for unit in units(40) if unit.kind in ("attention", "mlp")}
    placement = fill(Sizes(spec, DTYPE), int(share * sum(sizes.values())))
    read, seen, total = 0.0, 0.0, sum(sizes.values())
    on_disk = sum(size for unit, size in sizes.items() if placement[unit] == "disk") / total
    for unit, size in sizes.items():
        seen += size
        read += size * (placement[unit] == "disk")
        assert abs(read - on_disk * seen) <= 2.5 * max(sizes.values())


def test_an_untied_embedding_is_the_last_to_be_resident_since_a_token_needs_one_row_of_it() -> None:
    whole = sum(Sizes(LLAMA, DTYPE).matrices(unit) for unit in units(LLAMA.n_layers))
    embedding = Sizes(LLAMA, DTYPE).matrices(Unit("embedding"))
    placement = fill(Sizes(LLAMA, DTYPE), whole - embedding)
    assert grouped(placement)["disk"] == ["embedding"]
