"""Whatever a configuration places where, and however it cuts the work: the tokens of the resident model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, assume, given, settings

from engine.errors import ConfigError
from engine.llm import LLM
from engine.request import SamplingParams
from tests.engine.test_parity import random_tokens

LENGTHS = (1, 17, 40, 3, 16, 70, 5, 33, 100, 2)
PROMPTS = [random_tokens(length, seed=length) for length in LENGTHS]
PARAMS = [SamplingParams(temperature=0, max_tokens=2 + 5 * (i % 4), ignore_eos=True) for i in range(len(PROMPTS))]
UNITS = ["embedding", *(f"layers.{i}.{part}" for i in range(3) for part in ("attention", "mlp")), "head"]
MODELS = ("llama", "mistral-window", "opt")


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    weights: dict[str, list[str]] = {}
    for unit in UNITS:
        weights.setdefault(draw(st.sampled_from(["device", "host", "disk"]), label=unit), []).append(unit)
    rows = st.sampled_from([0, 16, 48, 400])
    kv = draw(st.lists(st.sampled_from([0, 0, 64, 200, 600]), min_size=3, max_size=3).filter(lambda n: max(n) >= 128))
    return {
        "weights": draw(st.sampled_from([None, weights])),
        "kv_tokens": kv[0],
        "kv_host_tokens": kv[1],
        "kv_disk_tokens": kv[2],
        "delegate": draw(st.booleans()),
        "read_ahead": draw(st.booleans()),
        "max_sequences": draw(st.integers(1, 12)),
        "prefill_rows": draw(st.sampled_from([1, 7, 32, 300])),
        "tile_rows": draw(st.sampled_from([1, 3, 16, 50, 512])),
        "activation_rows": draw(st.one_of(st.none(), rows)),
        "activation_host_rows": draw(rows),
        "activation_disk_rows": draw(rows),
        "schedule": draw(st.sampled_from(["continuous", "zigzag", "diagonal"])),
    }


@pytest.fixture(scope="module")
def expected(tiny_model: Callable[[str], Path]) -> Mapping[str, list[list[int]]]:
    return {name: tokens(tiny_model(name), {"kv_tokens": 4096}) for name in MODELS}


def tokens(model: Path, config: dict[str, Any]) -> list[list[int]]:
    with LLM(model, dtype="float32", threads=1, context=128, **config) as llm:
        return [[token.id for token in done.tokens] for done in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=configurations())
def test_every_place_gives_the_same_tokens(
    tiny_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    expected: Mapping[str, list[list[int]]],
    name: str,
    config: dict[str, Any],
) -> None:
    folder = tmp_path_factory.mktemp("spill")
    fields = {"memory_bytes": 10**8, "host_bytes": 10**8, "offload_dir": str(folder)} | config
    try:
        got = tokens(tiny_model(name), fields)
    except ConfigError:  # no room for a sweep's hidden states
        assume(False)
    assert got == expected[name]
    assert not list(folder.iterdir())
