"""The mixed-integer programme against trying everything, and names of units."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.config import TIERS
from engine.placement import named
from engine.planner.costs import CostModel, Costs, Option
from engine.planner.job import Job
from engine.planner.places import compact
from engine.planner.placing import KINDS, Counts, Placer, Room, Shape, named_units, together
from engine.sizes import Sizes
from engine.units import Unit, units

from .machines import laptop, llama, workstation

LAYERS = 2
BLOCK = 3


def case(seed: int) -> tuple[Shape, Costs, Room]:
    """Random memories for a small model on a random machine."""
    random = np.random.default_rng(seed)
    tied = bool(random.integers(2))
    spec = llama(LAYERS, tie_word_embeddings=tied)
    machine = workstation() if random.integers(2) else laptop()
    machine = replace(machine, disk_read=float(10 ** random.uniform(7, 10)))
    job = Job(int(random.integers(16, 200)), int(random.integers(2, 40)), BLOCK)
    model = CostModel(Sizes(spec, torch.bfloat16), machine, job)
    option = Option(BLOCK, 64, delegate=bool(random.integers(2)))
    sizes = {kind: model.weights_bytes(kind) for kind in KINDS}
    weights = sum(sizes[kind] * (LAYERS if kind in ("attention", "mlp") else 1) for kind in KINDS)
    kv = float(model.kv_bytes(option, job.context))
    everything = weights + BLOCK * kv
    slot = max(sizes.values())
    room = Room(
        device=int(everything * random.uniform(0.2, 1.3)) + 2 * slot,
        host=int(everything * random.uniform(0, 1)) if machine.separate else 0,
        disk=int(everything * random.uniform(0, 2)),
        loading=slot,
        streaming=2 * slot,
        kv_slots=int(kv),
    )
    tiers = TIERS if machine.separate else ("device", "disk")
    staged = ("disk",) if option.delegate else ("host", "disk")
    shape = Shape(LAYERS, sizes, tied, BLOCK, kv, tiers, True, [tier for tier in staged if tier in tiers])
    return shape, model.costs(option), room


def everything_tried(shape: Shape, costs: Costs, room: Room) -> float | None:
    """The least seconds over all placements, from the statement of the problem alone."""
    best = None
    splits = [c for c in itertools.product(range(LAYERS + 1), repeat=3) if sum(c) == LAYERS]
    kv_splits = [c for c in itertools.product(range(BLOCK + 1), repeat=len(shape.kv_tiers)) if sum(c) == BLOCK]
    for embedding, head, attention, mlp, kv in itertools.product(TIERS, TIERS, splits, splits, kv_splits):
        if shape.tied and (embedding == "device") != (head == "device"):
            continue
        size = shape.unit_bytes
        of_layers = {tier: size["attention"] * attention[i] + size["mlp"] * mlp[i] for i, tier in enumerate(TIERS)}
        sequences = dict(zip(shape.kv_tiers, kv, strict=True))
        held = {tier: of_layers[tier] + shape.kv_bytes * sequences.get(tier, 0) for tier in TIERS}
        held["disk"] = shape.kv_bytes * sequences.get("disk", 0)
        held[embedding] += size["embedding"] if embedding != "disk" else 0
        if head != "disk":
            held[head] += size["embedding"] if shape.tied and head == "host" else size["head"]
        streams = head != "device" or attention[0] < LAYERS or mlp[0] < LAYERS
        held["device"] += room.streaming if streams else room.loading
        held["device"] += room.kv_slots * sum(sequences.get(tier, 0) > 0 for tier in shape.staged)
        if held["device"] > room.device or held["host"] > room.host or held["disk"] > room.disk:
            continue
        read = {tier: float(of_layers[tier]) for tier in TIERS}
        read[head] += size["embedding"] if shape.tied else size["head"]
        read["device"] = 0.0
        prefill, decode = (
            together([form.seconds(read, sequences, embedding == "disk") for form in forms.values()], True)
            for forms in (costs.prefill, costs.decode)
        )
        total = prefill + costs.decode_sweeps * decode
        best = total if best is None else min(best, total)
    return best


@pytest.mark.parametrize("seed", range(25))
def test_no_placement_is_faster_than_the_one_found(seed: int) -> None:
    shape, costs, room = case(seed)
    expected, found = everything_tried(shape, costs, room), Placer().place(shape, costs, room)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.total_s == pytest.approx(expected, rel=1e-6)


def test_a_limit_on_the_time_is_kept() -> None:
    shape, costs, room = case(3)
    found = Placer().place(shape, costs, room)
    assert found is not None
    assert Placer().place(shape, costs, room, most_s=found.total_s * 0.99) is None
    assert Placer().place(shape, costs, room, most_s=found.total_s * 1.01) is not None


def test_units_are_named_once_each_and_spread_evenly() -> None:
    of = {(kind, tier): 0 for kind in KINDS for tier in TIERS}
    of |= {("embedding", "disk"): 1, ("head", "device"): 1}
    of |= {("attention", "device"): 12, ("mlp", "device"): 4, ("mlp", "host"): 2, ("mlp", "disk"): 6}
    tiers = named_units(12, Counts(of, {"device": 1}, 0.0, 0.0, 0.0))
    placement = named(llama(12), tiers)
    assert set(placement) == set(units(12))
    on_disk = [layer for layer in range(12) if placement[Unit("mlp", layer)] == "disk"]
    assert len(on_disk) == 6
    assert max(b - a for a, b in itertools.pairwise(on_disk)) <= 3


def test_short_names_mean_the_same_units() -> None:
    spec = llama(9)
    for seed in range(20):
        random = np.random.default_rng(seed)
        tiers: dict[str, list[str]] = {tier: [] for tier in TIERS}
        for unit in units(9):
            tiers[TIERS[random.integers(3)]].append(str(unit))
        short = {tier: compact(names) for tier, names in tiers.items()}
        assert named(spec, short) == named(spec, tiers)  # type: ignore[arg-type]
