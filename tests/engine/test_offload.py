"""Offloaded equals resident: the same tokens and logits in float32, wherever weights and KV are."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.random_model import save_random
from engine.config import TILE_ROWS
from engine.llm import LLM
from engine.request import Completion, SamplingParams
from engine.storage.spill import SpillFile
from tests.engine.sweeps import Bench
from tests.engine.test_parity import difference, random_tokens
from tests.engine.tiny import CONFIGS

TinyModel = Callable[[str], Path]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TOLERANCE = 2e-5
"""Of logits: resident matrices are packed for oneDNN, which rounds in another order."""
AMPLE = 10**8
PROMPTS = [random_tokens(length, seed=length) for length in (1, 16, 33, 110)]
ALL_ON_DISK = {"disk": ["embedding", "layers.0-2", "head"]}
MIXED = {"device": ["layers.1.attention"], "host": ["layers.0", "layers.2.mlp"], "disk": [
    "embedding", "layers.1.mlp", "layers.2.attention", "head"]}  # fmt: skip
TABLES_ON_HOST = {"host": ["embedding", "head"], "disk": ["layers.0-2"]}
HEAD_ALONE_ON_DISK = {"host": ["embedding"], "device": ["layers.0-2"], "disk": ["head"]}

PLACES: dict[str, dict[str, Any]] = {
    "weights on disk": {"weights": ALL_ON_DISK},
    "weights everywhere": {"weights": MIXED},
    "tables on the host": {"weights": TABLES_ON_HOST},
    "the head alone on disk": {"weights": HEAD_ALONE_ON_DISK},
    "KV on disk": {"kv_tokens": 0, "kv_disk_tokens": 1024},
    "KV on device and disk": {"kv_tokens": 64, "kv_disk_tokens": 1024},
    "KV on the host, attended to there": {"kv_tokens": 0, "kv_host_tokens": 1024},
    "KV on the host, brought in": {"kv_tokens": 0, "kv_host_tokens": 1024, "delegate": False},
    "nothing read ahead": {"weights": ALL_ON_DISK, "kv_tokens": 0, "kv_disk_tokens": 1024, "read_ahead": False},
    "all of it": {
        "weights": MIXED, "kv_tokens": 48, "kv_host_tokens": 64, "kv_disk_tokens": 1024, "delegate": False
    },
}  # fmt: skip

DEFINING = ("weights on disk", "KV on disk", "all of it")
"""Places that every family is tried in; the others are for SOME."""
SOME = ("llama", "mistral-window", "opt", "qwen2")


@pytest.fixture
def offloaded(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    """Makes engines that spill to ``tmp_path``, and sees that they leave nothing there."""
    made: list[LLM] = []

    def make(model: Path, **config: Any) -> LLM:
        fields = {"dtype": "float32", "threads": 1, "memory_bytes": AMPLE, "host_bytes": AMPLE} | config
        made.append(LLM(str(model), offload_dir=str(tmp_path / "offload"), **fields))
        return made[-1]

    yield make
    for llm in made:
        stats = llm.engine.stats()
        assert stats.kv_blocks_used == stats.running == stats.waiting == 0
        llm.close()
    assert not (tmp_path / "offload").exists() or not any((tmp_path / "offload").iterdir())


def ids(completions: list[Completion]) -> list[list[int]]:
    return [[token.id for token in completion.tokens] for completion in completions]


@pytest.fixture(scope="session")
def resident(tiny_model: TinyModel) -> Callable[[str], list[list[int]]]:
    """The tokens of PROMPTS with everything on the device."""
    known: dict[str, list[list[int]]] = {}

    def get(name: str) -> list[list[int]]:
        if name not in known:
            known[name] = ids(LLM(str(tiny_model(name)), dtype="float32", threads=1).generate(PROMPTS, GREEDY))
        return known[name]

    return get


@pytest.mark.parametrize(
    ("name", "place"),
    [(name, place) for name in CONFIGS for place in PLACES if name in SOME or place in DEFINING],
)
def test_tokens_equal_those_of_a_resident_model(
    tiny_model: TinyModel,
    resident: Callable[[str], list[list[int]]],
    offloaded: Callable[..., LLM],
    name: str,
    place: str,
) -> None:
    assert ids(offloaded(tiny_model(name), **PLACES[place]).generate(PROMPTS, GREEDY)) == resident(name)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("place", ["KV on disk", "KV on the host, brought in", "KV on the host, attended to there"])
def test_logits_of_every_position_equal_those_of_a_resident_model(
    tiny_model: TinyModel, tmp_path: Path, name: str, place: str
) -> None:
    tokens = random_tokens(100, seed=5)
    expected = Bench(tiny_model(name), threads=1).logits(tokens)
    fields: Mapping[str, Any] = {"weights": MIXED, "memory_bytes": AMPLE, "host_bytes": AMPLE, **PLACES[place]}
    bench = Bench(tiny_model(name), threads=1, offload_dir=str(tmp_path), **fields)
    for chunk in (None, 23):
        assert difference(bench.logits(tokens, chunk), expected) < TOLERANCE
    bench.engine.close()


def test_weights_alone_change_no_logit_by_a_bit_where_products_are_the_same(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """From host or disk, read ahead or not: the same bytes reach the same products."""
    tokens = random_tokens(40, seed=6)
    logits: list[Tensor] = []
    for weights, ahead in ((ALL_ON_DISK, True), (ALL_ON_DISK, False), ({"host": ALL_ON_DISK["disk"]}, True)):
        fields: Mapping[str, Any] = {"weights": weights, "read_ahead": ahead, "memory_bytes": AMPLE}
        bench = Bench(tiny_model("llama"), threads=1, host_bytes=AMPLE, **fields)
        logits.append(bench.logits(tokens))
        bench.engine.close()
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@pytest.mark.parametrize("read_ahead", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "opt"])
def test_many_small_cohorts_give_the_same_tokens(
    tiny_model: TinyModel, offloaded: Callable[..., LLM], name: str, read_ahead: bool
) -> None:
    """Slots hold one long sequence or a few short ones, prompts come in chunks, and lengths differ."""
    prompts = [random_tokens(length, seed=length) for length in (1, 3, 15, 16, 17, 30, 47, 64, 90, 100, 5, 77)]
    expected = ids(LLM(str(tiny_model(name)), dtype="float32", threads=1).generate(prompts, GREEDY))
    llm = offloaded(
        tiny_model(name),
        memory_bytes=1_700_000,
        weights=ALL_ON_DISK,
        kv_tokens=48,
        kv_disk_tokens=1500,
        context=128,
        prefill_rows=50,
        read_ahead=read_ahead,
    )
    disk = llm.engine._homes[-1]
    assert disk.cohort_blocks is not None
    assert disk.cohort_blocks < 25, "several cohorts in a sweep"
    assert ids(llm.generate(prompts, GREEDY)) == expected


@pytest.mark.parametrize("read_ahead", [True, False])
@pytest.mark.parametrize("tile_rows", [1, 4, 7])
@pytest.mark.parametrize(
    "rows",
    [
        {"activation_rows": 0, "activation_disk_rows": 80},
        {"activation_rows": 0, "activation_host_rows": 80},
        {"activation_rows": 8, "activation_host_rows": 16, "activation_disk_rows": 80},
    ],
    ids=["disk", "host", "all three"],
)
def test_hidden_states_elsewhere_change_no_token(
    tiny_model: TinyModel, offloaded: Callable[..., LLM], rows: dict[str, int], tile_rows: int, read_ahead: bool
) -> None:
    """Far more tiles than slots, so that every slot is used again before the sweep's logits are made."""
    prompts = [random_tokens(length, seed=length) for length in (3, 5, 16, 17, 40, 2, 9, 31, 4, 8, 70, 6)]
    expected = ids(LLM(str(tiny_model("llama")), dtype="float32", threads=1).generate(prompts, GREEDY))
    llm = offloaded(
        tiny_model("llama"), max_sequences=12, prefill_rows=48, tile_rows=tile_rows, read_ahead=read_ahead, **rows
    )
    assert ids(llm.generate(prompts, GREEDY)) == expected


@pytest.mark.parametrize("place", ["kv_host_tokens", "kv_disk_tokens"])
def test_sequences_that_gave_way_on_the_device_go_on_elsewhere_with_the_same_tokens(
    tiny_model: TinyModel, offloaded: Callable[..., LLM], place: str
) -> None:
    prompts = [random_tokens(30, seed=seed) for seed in range(8)]
    params = replace(GREEDY, max_tokens=60)
    expected = ids(LLM(str(tiny_model("llama")), dtype="float32", threads=1).generate(prompts, params))
    llm = offloaded(
        tiny_model("llama"), weights=ALL_ON_DISK, kv_tokens=160, prefill_rows=40, context=128, **{place: 256}
    )
    assert ids(llm.generate(prompts, params)) == expected
    assert llm.engine.stats().preemptions > 0


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=20)])
def test_kv_on_disk_is_used_again_by_sequences_that_come_later(
    tiny_model: TinyModel, offloaded: Callable[..., LLM], params: SamplingParams
) -> None:
    """Blocks are handed on with what the one before wrote to them."""
    prompts = [random_tokens(length, seed=length) for length in (40, 2, 90, 17, 33, 64, 5, 81, 12, 50)]
    expected = ids(LLM(str(tiny_model("llama")), dtype="float32", threads=1).generate(prompts, params))
    llm = offloaded(tiny_model("llama"), kv_tokens=0, kv_disk_tokens=256, context=128)
    for _ in range(2):
        assert ids(llm.generate(prompts, params)) == expected


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for several tiles."""
    shape = CONFIGS["llama"].to_dict() | {"max_position_embeddings": 4096, "num_hidden_layers": 2}
    return save_random(tmp_path_factory.mktemp("long"), LlamaConfig(**shape))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"weights": {"disk": ["embedding", "layers.0-1", "head"]}},
        {"kv_tokens": 0, "kv_disk_tokens": 8192},
        {"kv_tokens": 0, "kv_host_tokens": 8192, "delegate": False, "read_ahead": False},
        {"kv_tokens": 2800, "kv_disk_tokens": 4096},
    ],
)
def test_sweeps_of_several_tiles_give_the_same_tokens(
    long_model: Path, offloaded: Callable[..., LLM], fields: Mapping[str, Any]
) -> None:
    prompts = [random_tokens(length, seed=length) for length in (2500, TILE_ROWS, 30, TILE_ROWS + 1, 700)]
    params = replace(GREEDY, max_tokens=4)
    small = LLM(str(long_model), dtype="float32", threads=2, prefill_rows=300, context=3000)
    expected = ids(small.generate(prompts, params))
    llm = offloaded(long_model, context=3000, prefill_rows=4000, threads=2, **fields)
    assert ids(llm.generate(prompts, params)) == expected


def saved_as(model: Path, directory: Path, dtype: torch.dtype) -> Path:
    """A copy of the model whose tensors are stored in another type."""
    directory.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["llama", "opt", "qwen2"])
def test_weights_of_another_type_are_converted_as_they_are_read(
    tiny_model: TinyModel, offloaded: Callable[..., LLM], tmp_path: Path, name: str, stored: torch.dtype
) -> None:
    model = saved_as(tiny_model(name), tmp_path / "stored", stored)
    expected = ids(LLM(str(model), dtype="float32", threads=1).generate(PROMPTS, GREEDY))
    for place in ("weights on disk", "weights everywhere", "tables on the host"):
        weights = PLACES[place]["weights"]
        if name == "qwen2" and place == "tables on the host":
            weights = TABLES_ON_HOST
        assert ids(offloaded(model, weights=weights).generate(PROMPTS, GREEDY)) == expected


def test_bfloat16_weights_read_for_bfloat16_products_are_the_stored_ones(
    tiny_model: TinyModel, offloaded: Callable[..., LLM], tmp_path: Path
) -> None:
    model = saved_as(tiny_model("llama"), tmp_path / "stored", torch.bfloat16)
    llm = offloaded(model, weights=ALL_ON_DISK, dtype="bfloat16")
    stored = load_file(model / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    store = llm.engine._parts.weights
    store.expect(range(3), head=False)
    with store.mlp(1, rows=1) as weights:
        assert torch.equal(weights.down, stored)


def in_shards(model: Path, directory: Path, shards: int) -> Path:
    """A copy of the model in several files, neighbouring tensors in different ones."""
    directory.mkdir()
    tensors = load_file(model / "model.safetensors")
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    where = {name: f"model-{i % shards:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(where.values()):
        own = {name: tensor for name, tensor in tensors.items() if where[name] == shard}
        save_file(own, directory / shard, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize("name", ["llama", "opt-gelu-no-bias", "qwen2"])
def test_a_matrix_fused_from_several_files_is_the_same(
    tiny_model: TinyModel,
    resident: Callable[[str], list[list[int]]],
    offloaded: Callable[..., LLM],
    tmp_path: Path,
    name: str,
) -> None:
    model = in_shards(tiny_model(name), tmp_path / "shards", 3)
    assert ids(offloaded(model, weights=ALL_ON_DISK).generate(PROMPTS, GREEDY)) == resident(name)
    assert ids(offloaded(model).generate(PROMPTS, GREEDY)) == resident(name)


def test_kv_on_a_disk_without_direct_io_is_the_same(
    tiny_model: TinyModel, resident: Callable[[str], list[list[int]]], offloaded: Callable[..., LLM]
) -> None:
    """Blocks of one KV head are smaller than a disk's block, so they go through the page cache."""
    name = "llama-one-kv-head-tied"
    llm = offloaded(tiny_model(name), kv_tokens=0, kv_disk_tokens=512)
    spill = llm.engine._homes[0]._spills[0]  # type: ignore[attr-defined]
    assert isinstance(spill, SpillFile)
    assert not spill.direct
    assert ids(llm.generate(PROMPTS[:3], GREEDY)) == resident(name)[:3]
