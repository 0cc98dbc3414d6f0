"""Predicted against measured: plans of several kinds for two models, carried out in simulation and for real."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.offload.models import random_prompts
from engine.checkpoint.store import resolve
from engine.config import EngineConfig
from engine.llm import LLM
from engine.planner.hardware import Hardware
from engine.planner.job import Job
from engine.planner.simulator.run import Simulation, simulate
from engine.quant.format import Quantisation
from engine.request import SamplingParams
from engine.sizes import Sizes
from engine.spec import ModelSpec

PROMPT = 128
MIB = 2**20
ABLATION_BYTES = 1800 * MIB
DIFFERENT = 1.25
"""Plans whose measured speeds differ by more than this should be ranked right."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    config: EngineConfig
    job: Job


@dataclass(frozen=True, slots=True)
class Compared:
    """Tokens a second of one plan."""

    name: str
    measured: float
    predicted: float
    bound: str

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return abs(self.predicted / self.measured - 1)


def cases(model: str, copy: str, weights_mb: float, batches: tuple[int, ...], gen_len: int) -> Iterator[Case]:
    """Plans in memory, with weights read from disk, with KV on disk and with the quantised ``copy``."""

    def case(name: str, path: str, batch: int, **fields: Any) -> Case:
        job = Job(PROMPT, gen_len, batch)
        positions = batch * -(-job.context // 16) * 16
        kv: dict[str, Any] = {"kv_tokens": positions}
        if fields.pop("kv_on_disk", False):
            kv = {"kv_tokens": 0, "kv_disk_tokens": positions}
        config = EngineConfig(
            model=path, dtype="bfloat16", device="cpu", context=job.context, max_sequences=batch, **kv, **fields
        )
        return Case(f"{name}, batch {batch}", config, job)

    for batch in batches:
        yield case("in memory", model, batch, memory_bytes=int((weights_mb + 900) * 1e6))
    for batch in batches:
        yield case("3/4 of the weights' size", model, batch, memory_bytes=_memory(weights_mb, 0.75))
    yield case("half of it", model, batches[1], memory_bytes=_memory(weights_mb, 0.5))
    yield case("KV on disk", model, batches[1], memory_bytes=_memory(weights_mb, 0.75), kv_on_disk=True)
    yield case("KV on disk, in memory", model, batches[-1], memory_bytes=int((weights_mb + 900) * 1e6), kv_on_disk=True)
    for batch in batches[:2]:
        yield case("4 bits, in memory", copy, batch, memory_bytes=int((weights_mb + 900) * 1e6))
    yield case("4 bits, half of their size", copy, batches[1], memory_bytes=_memory(0.4 * weights_mb, 0.5))


def _memory(weights_mb: float, share: float) -> int:
    """That share of the weights, beside what an engine takes for buffers, workspaces and a small KV cache."""
    return int((weights_mb * share + 90) * 1e6)


def ablation(model: str, batch: int, gen_len: int) -> Iterator[Case]:
    """The ablation of the offload benchmark, in two thirds of the weights' memory."""
    job = Job(PROMPT, gen_len, batch)
    positions = batch * -(-job.context // 16) * 16
    spec = ModelSpec.from_directory(resolve(model))
    kv_bytes = positions * spec.kv_elements_per_token * 2 * spec.n_layers
    common: dict[str, Any] = {"model": model, "dtype": "bfloat16", "device": "cpu", "context": job.context}
    common |= {"max_sequences": batch, "memory_bytes": ABLATION_BYTES}
    host = {
        "kv_tokens": 0,
        "kv_host_tokens": positions,
        "host_bytes": kv_bytes,
        "memory_bytes": ABLATION_BYTES - kv_bytes,
    }
    rows = max(1, batch // 4)
    nowhere = {"disk": ["embedding", f"layers.0-{spec.n_layers - 1}", "head"]}
    variants: dict[str, dict[str, Any]] = {
        "all on": {"kv_tokens": positions},
        "no overlap": {"kv_tokens": positions, "read_ahead": False},
        "KV in another tier, delegated": host,
        "the same, not delegated": host | {"delegate": False},
        f"row by row ({rows} at a time)": {"max_sequences": rows, "schedule": "zigzag", "kv_tokens": positions},
        "nothing resident": {"kv_tokens": positions, "weights": nowhere},
    }
    for name, fields in variants.items():
        yield Case(name, EngineConfig(**{**common, **fields}), job)


def predict(case: Case, hardware: Hardware) -> Simulation:
    directory = resolve(case.config.model)
    spec = ModelSpec.from_directory(directory)
    return simulate(case.config, Sizes(spec, torch.bfloat16, Quantisation.of(directory)), hardware, case.job)


def measure(case: Case, threads: int, offload_dir: Path) -> float:
    """Generated tokens a second, prefill included."""
    config = replace(case.config, threads=threads, offload_dir=str(offload_dir))
    with LLM.of(config) as llm:
        params = SamplingParams(temperature=0, max_tokens=case.job.gen_len, ignore_eos=True)
        prompts = random_prompts(case.job.n_sequences, case.job.prompt_len, 320)
        llm.generate(prompts[:1], replace(params, max_tokens=2))  # kernels are made and buffers touched
        begun = time.perf_counter()
        llm.generate(prompts, params)
        return case.job.n_sequences * case.job.gen_len / (time.perf_counter() - begun)


def ranked_right(compared: list[Compared]) -> tuple[int, int]:
    """Pairs whose speeds differ clearly: how many are in the right order, and how many there are."""
    right = pairs = 0
    for i, one in enumerate(compared):
        for other in compared[i + 1 :]:
            ratio = one.measured / other.measured
            if max(ratio, 1 / ratio) > DIFFERENT:
                pairs += 1
                right += (one.predicted > other.predicted) == (one.measured > other.measured)
    return right, pairs
