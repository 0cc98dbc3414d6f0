"""Dividing the budgets: nothing is handed out twice, and a refusal names value, limit and remedy."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from engine.budget import Budget, divide
from engine.build import build
from engine.config import EngineConfig, TierName
from engine.device import CpuDevice, open_device
from engine.errors import ConfigError, OutOfMemoryError
from engine.kv import BLOCK, KVFormat, blocks_for
from engine.sizes import Sizes
from engine.spec import ModelSpec
from engine.units import Unit, units

TinyModel = Callable[[str], Path]
AMPLE = 10**8
NAMES = ["llama", "qwen2", "opt", "llama-one-kv-head-tied"]


def config(model: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(str(model), **{"dtype": "float32", "threads": 1, **fields})


def divided(model: Path, **fields: Any) -> Budget:
    made = config(model, **fields).validate()
    device = open_device(made)
    return divide(made, Sizes(ModelSpec.from_directory(model), device.dtype), device)


def least_memory(model: Path, **fields: Any) -> int:
    """The smallest memory limit that is not refused."""
    low, high = 1, AMPLE
    while high - low > 1:
        middle = (low + high) // 2
        try:
            divided(model, memory_bytes=middle, **fields)
            high = middle
        except OutOfMemoryError:
            low = middle
    return high


@st.composite
def placements(draw: st.DrawFn, tied: bool, layers: int = 3) -> dict[TierName, list[str]] | None:
    """Every unit on some tier; or None."""
    tier: st.SearchStrategy[TierName] = st.sampled_from(("device", "host", "disk"))
    if not draw(st.booleans()):
        return None
    placed: dict[TierName, list[str]] = {}
    for unit in units(layers):
        where = draw(tier)
        if tied and unit.kind == "head":
            where = next(t for t, names in placed.items() if "embedding" in names)
        placed.setdefault(where, []).append(str(unit))
    return placed


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_not_refused_is_loaded_within_every_limit(
    tiny_model: TinyModel, tmp_path: Path, data: st.DataObject
) -> None:
    draw = data.draw
    name = draw(st.sampled_from(NAMES))
    tokens = st.one_of(st.just(0), st.integers(1, 1500))
    made = config(
        tiny_model(name),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        memory_bytes=draw(st.integers(800_000, 6_000_000)),
        host_bytes=AMPLE,
        weights=draw(placements(ModelSpec.from_directory(tiny_model(name)).tied)),
        kv_host_tokens=draw(tokens),
        kv_disk_tokens=draw(tokens),
        delegate=draw(st.booleans()),
        context=draw(st.one_of(st.none(), st.integers(1, 512))),
        max_sequences=draw(st.integers(1, 40)),
        prefill_rows=draw(st.integers(1, 600)),
        offload_dir=str(tmp_path),
    )
    elsewhere = bool(made.kv_host_tokens or made.kv_disk_tokens)
    made = replace(made, kv_tokens=draw(st.one_of(st.none(), st.integers(0 if elsewhere else 1, 2000))))
    try:
        budget = divided(tiny_model(name), **{f: getattr(made, f) for f in made.__slots__ if f != "model"})
    except OutOfMemoryError:
        return
    parts = build(made)
    parts.close()
    assert parts.context <= (made.context or 512)
    for tier in parts.tiers.values():
        assert 0 <= tier.used_bytes <= tier.capacity_bytes
    if made.kv_tokens is not None:
        assert budget.kv_blocks["device"] == blocks_for(made.kv_tokens)
    assert budget.kv_blocks["host"] == blocks_for(made.kv_host_tokens)
    assert budget.kv_blocks["disk"] == blocks_for(made.kv_disk_tokens)
    assert any(blocks >= blocks_for(parts.context) for blocks in budget.kv_blocks.values()), "one sequence fits"


@pytest.mark.parametrize("name", NAMES)
def test_the_least_memory_that_is_not_refused_is_enough(tiny_model: TinyModel, name: str) -> None:
    least = least_memory(tiny_model(name), context=64)
    parts = build(config(tiny_model(name), memory_bytes=least, context=64))
    parts.close()
    assert parts.tiers["device"].used_bytes <= least
    assert parts.homes[0].pool.n_blocks == blocks_for(64)


def test_every_kind_of_slot_is_counted(tiny_model: TinyModel, tmp_path: Path) -> None:
    """KV on the host and KV on disk pass through slots of their own."""
    fields = {
        "kv_tokens": 640, "kv_host_tokens": 512, "kv_disk_tokens": 512, "delegate": False, "host_bytes": AMPLE,
        "offload_dir": str(tmp_path),
    }  # fmt: skip
    least = least_memory(tiny_model("llama"), **fields)
    parts = build(config(tiny_model("llama"), memory_bytes=least, **fields))
    parts.close()
    assert parts.tiers["device"].used_bytes <= least


def test_weights_on_disk_take_no_memory_but_their_slots(tiny_model: TinyModel) -> None:
    spec = ModelSpec.from_directory(tiny_model("llama"))
    everything = {"disk": [str(unit) for unit in units(spec.n_layers)]}
    parts = build(config(tiny_model("llama"), memory_bytes=AMPLE, weights=everything, kv_tokens=64))
    parts.close()
    held = parts.tiers["device"].by_use()
    assert held["weights"] < 10_000, "norms alone"
    assert held["io"] <= 3 * (
        max(Sizes(spec, torch.float32).matrices(Unit(k)) for k in ("attention", "mlp")) + 4 * 4096
    )


def test_what_is_named_resident_is_held_to_the_byte(tiny_model: TinyModel) -> None:
    spec = ModelSpec.from_directory(tiny_model("llama"))
    bare = build(config(tiny_model("llama"), memory_bytes=AMPLE, kv_tokens=64, weights={"disk": _all_but()}))
    kept = build(
        config(
            tiny_model("llama"),
            memory_bytes=AMPLE,
            kv_tokens=64,
            weights={"device": ["layers.1.mlp"], "disk": _all_but("layers.1.mlp")},
        )
    )
    bare.close()
    kept.close()
    more = kept.tiers["device"].by_use()["weights"] - bare.tiers["device"].by_use()["weights"]
    assert more == Sizes(spec, torch.float32).matrices(Unit("mlp", 1))


def _all_but(*names: str) -> list[str]:
    return [str(unit) for unit in units(3) if str(unit) not in names]


def test_kv_tokens_are_given_in_full_or_refused(tiny_model: TinyModel) -> None:
    assert divided(tiny_model("llama"), memory_bytes=AMPLE, kv_tokens=1000).kv_blocks["device"] == blocks_for(1000)
    with pytest.raises(OutOfMemoryError, match=r"KV cache of 1000000 positions"):
        divided(tiny_model("llama"), memory_bytes=AMPLE, kv_tokens=1_000_000)


def test_half_of_the_room_goes_to_kv_where_weights_do_not_fit(tiny_model: TinyModel) -> None:
    spec = ModelSpec.from_directory(tiny_model("llama"))
    least = least_memory(tiny_model("llama"), context=64)
    budget = divided(tiny_model("llama"), memory_bytes=least + 400_000, context=64)
    assert "disk" in budget.placement.values()
    assert budget.kv_blocks["device"] * 3 * KVFormat(spec, torch.float32).block_bytes >= 90_000


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"memory_bytes": 100_000}, OutOfMemoryError,
         r"limit is 97.66 KiB; .* KiB for float32 weights .*workspaces.*KV cache of 512 positions\. Raise the limit"),
        ({"memory_bytes": 100_000, "kv_tokens": 80}, OutOfMemoryError, r"KV cache of 80 positions.*lower context"),
        ({"memory_bytes": 2**60}, OutOfMemoryError, r"limit is 1048576.00 TiB and only .* free on 'cpu'; lower"),
        ({"memory_bytes": AMPLE, "host_bytes": 2**60}, OutOfMemoryError, r"host memory limit .* only .* free .*lower"),
        ({"context": 513}, ConfigError, r"context is 513; .* at most 512 positions"),
        ({"weights": {"device": ["layers.0-2"]}}, ConfigError, r"embedding, head \(2 units\) .* name a tier"),
    ],
)  # fmt: skip
def test_a_refusal_names_value_limit_and_remedy(
    tiny_model: TinyModel, fields: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        divided(tiny_model("llama"), **fields)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("weights", {"gpu": ["head"]}, "'gpu' is no tier; there are device, host, disk"),
        ("kv_tokens", 0, "kv_tokens is 0; it must be at least 1"),
        ("kv_tokens", -1, "at least 1"),
        ("kv_host_tokens", -1, "kv_host_tokens is -1; it must be at least 0"),
        ("kv_disk_tokens", -1, "kv_disk_tokens is -1; it must be at least 0"),
        ("memory_bytes", 0, "memory_bytes is 0; it must be at least 1"),
        ("host_bytes", 0, "host_bytes is 0"),
        ("disk_bytes", 0, "disk_bytes is 0"),
        ("schedule", "spiral", "schedule is 'spiral'; it must be one of continuous, zigzag, diagonal"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(field: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig("any", **{field: value}).validate()


def test_the_device_may_hold_no_kv_if_another_tier_does(tiny_model: TinyModel, tmp_path: Path) -> None:
    budget = divided(
        tiny_model("llama"), memory_bytes=AMPLE, kv_tokens=0, kv_disk_tokens=100, offload_dir=str(tmp_path)
    )
    assert budget.kv_blocks == {"device": 0, "host": 0, "disk": blocks_for(100)}
    assert budget.context == 100


@pytest.mark.parametrize(
    ("fields", "size", "remedies"),
    [
        ({"kv_host_tokens": 512, "host_bytes": 1000}, "1000 B", "host_bytes.*kv_host_tokens"),
        ({"kv_disk_tokens": 512, "disk_bytes": 1000}, "1000 B", "disk_bytes.*kv_disk_tokens"),
        ({"kv_host_tokens": 512}, "0 B", "host_bytes"),
    ],
)
def test_a_full_tier_names_its_own_limits(
    tiny_model: TinyModel, tmp_path: Path, fields: dict[str, Any], size: str, remedies: str
) -> None:
    with pytest.raises(OutOfMemoryError, match=rf"{size}.*{remedies}"):
        build(config(tiny_model("llama"), memory_bytes=AMPLE, offload_dir=str(tmp_path), **fields))


def test_the_workspaces_of_a_longer_context_are_counted(tiny_model: TinyModel) -> None:
    least = [least_memory(tiny_model("llama"), context=context) for context in (16, 128, 512)]
    assert least == sorted(least)
    spec = ModelSpec.from_directory(tiny_model("llama"))
    kv = 3 * KVFormat(spec, torch.float32).block_bytes * (512 - 16) // BLOCK
    assert least[2] - least[0] >= kv, "at least the KV of the longer sequence"


def test_the_device_of_a_cpu_is_its_own_host() -> None:
    device = CpuDevice(torch.float32, 1)
    assert device.host is device
