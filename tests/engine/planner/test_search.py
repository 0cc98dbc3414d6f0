"""Plans: they fit wherever they are tried, beat the simplest ones, and keep to the limits."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError, OutOfMemoryError
from engine.kv import blocks_for
from engine.planner.job import Job
from engine.planner.plan import Plan
from engine.planner.planner import check_plan, make_plan
from engine.planner.search import search
from engine.planner.simulator.run import build_simulated, simulate
from engine.planner.task import Task
from engine.quant.format import Quantisation
from engine.quant.scheme import Scheme

from .live import LiveBytes
from .machines import GIB, laptop, llama, workstation

MIB = 2**20
JOB = Job(60, 8, 16)


def task(**changes: Any) -> Task:
    values: dict[str, Any] = {
        "model": "m",
        "spec": llama(),
        "hardware": laptop(),
        "job": JOB,
        "dtype": torch.bfloat16,
        "memory_bytes": 60 * MIB,
    }
    return Task(**{**values, **changes})


def test_a_model_that_fits_stays_in_memory() -> None:
    plan = make_plan(task(memory_bytes=500 * MIB))
    assert set(plan.settings["weights"]) == {"device"}
    assert plan.settings["max_sequences"] == JOB.n_sequences
    assert plan.prediction is not None
    assert plan.prediction.memory["device"]["capacity"] == 500 * MIB


def test_a_plan_is_never_slower_than_the_simplest_that_fits() -> None:
    for memory in (40, 60, 90):
        given = task(spec=llama(8, 512), memory_bytes=memory * MIB)
        best = search(given).ranked[0]
        tokens = blocks_for(JOB.context) * 16
        for block in (1, 4, 16):
            simple = replace(given.base(), max_sequences=block, kv_tokens=block * tokens)
            try:
                other = simulate(simple, given.sizes, given.hardware, replace(JOB, n_sequences=block))
            except OutOfMemoryError:
                continue
            assert best.simulation.throughput >= 0.999 * other.throughput


def test_a_latency_limit_makes_the_blocks_smaller() -> None:
    given = task(job=Job(60, 8, 256))
    free = make_plan(given)
    assert free.prediction is not None
    limit_s = free.prediction.latency_s / 3
    limited = make_plan(replace(given, latency_limit_s=limit_s))
    assert limited.prediction is not None
    assert limited.prediction.latency_s <= limit_s
    assert limited.config().max_sequences < free.config().max_sequences
    with pytest.raises(ConfigError, match="latency_limit"):
        make_plan(replace(given, latency_limit_s=1e-9))


def test_what_cannot_fit_is_told_with_the_least_that_would() -> None:
    with pytest.raises(OutOfMemoryError, match=r"no plan fits 1\.00 MiB.*takes \d+ KiB there") as refused:
        make_plan(task(memory_bytes=MIB))
    least = int(re.search(r"takes (\d+) KiB", str(refused.value))[1])  # type: ignore[index]
    assert make_plan(task(memory_bytes=least * 1024))
    with pytest.raises(OutOfMemoryError):
        make_plan(task(memory_bytes=least * 1024 * 9 // 10))


def test_a_machine_without_a_disk_has_nothing_on_it() -> None:
    diskless = replace(laptop(), disk_bytes=0, disk_read=0.0, disk_write=0.0, disk_latency_s=0.0)
    for machine in (diskless, replace(workstation(), disk_bytes=0, disk_read=0.0, disk_write=0.0)):
        plan = make_plan(replace(task(), hardware=machine, memory_bytes=64 * MIB))
        assert not dict(plan.settings.get("weights") or {}).get("disk")
        assert plan.settings.get("kv_disk_tokens", 0) == 0
        on_disk = replace(plan, settings={**plan.settings, "kv_tokens": 0, "kv_disk_tokens": 2048, "disk_bytes": GIB})
        with pytest.raises(OutOfMemoryError, match="has no disk for kv_disk_tokens"):
            check_plan(on_disk, replace(task(), hardware=machine))


def test_the_tier_that_is_too_small_is_blamed() -> None:
    given = replace(task(), hardware=replace(workstation(), disk_bytes=0, disk_read=0.0, disk_write=0.0))
    spec = llama(8, 512)
    with pytest.raises(OutOfMemoryError, match=r"does not fit the host's 1\.00 MiB, and there is no disk"):
        make_plan(replace(given, spec=spec, memory_bytes=24 * MIB, host_bytes=MIB))
    with pytest.raises(OutOfMemoryError, match="Raise the memory"):
        make_plan(task(memory_bytes=MIB, latency_limit_s=1000.0))
    with pytest.raises(ConfigError, match="the quickest one tried takes"):
        make_plan(task(latency_limit_s=1e-6))


def test_a_checked_plan_is_checked_in_its_own_dtype_and_for_its_own_job() -> None:
    plan = make_plan(task())
    with pytest.raises(ConfigError, match="context is 10; this plan's job has"):
        check_plan(replace(plan, settings={**plan.settings, "context": 10}), task())
    with pytest.raises(ConfigError, match="dtype is 'float16'; rates of 'laptop' are known for bfloat16"):
        check_plan(replace(plan, settings={**plan.settings, "dtype": "float16"}), task())


def test_a_last_block_that_is_not_full_counts_as_one() -> None:
    given = replace(task(), job=Job(64, 8, 20))
    found = search(given)
    best = found.ranked[0]
    blocks = -(-20 // best.config.max_sequences)
    assert given.throughput(best.simulation) <= 20 * 8 / (blocks * best.simulation.total_s) * 1.001


def test_jobs_that_make_no_sense_are_refused() -> None:
    for job, words in ((Job(0, 4), "prompt_len is 0"), (Job(4000, 4), "at most 2048"), (Job(4, 4, -1), "n_sequences")):
        with pytest.raises(ConfigError, match=words):
            make_plan(task(job=job))


def test_a_plan_that_was_edited_into_what_does_not_fit_is_refused_with_its_terms() -> None:
    plan = make_plan(task())
    assert check_plan(plan, task()).prediction is not None
    more = Plan(plan.model, plan.hardware, plan.job, {**plan.settings, "kv_tokens": 10**6})
    with pytest.raises(OutOfMemoryError, match="for the KV cache of 1000000 positions"):
        check_plan(more, task())
    with pytest.raises(ConfigError, match=r"'layers\.9' is outside"):
        check_plan(replace(more, settings={**plan.settings, "weights": {"disk": ["layers.9"]}}), task())


def test_losers_say_why() -> None:
    plan = make_plan(task(spec=llama(8, 512)))
    assert plan.rejected
    assert all("the time for a token" in lost.reason for lost in plan.rejected)
    assert all(lost.throughput <= plan.prediction.throughput for lost in plan.rejected if plan.prediction)


def triple(seed: int) -> Task:
    """A random model, machine and request."""
    random = np.random.default_rng(seed)
    heads = int(random.choice([4, 8]))
    hidden = heads * int(random.choice([32, 64]))
    family = str(random.choice(["llama", "opt"]))
    changes: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads // int(random.choice([1, 2, 4])),
    }
    if family == "opt":
        changes |= {
            "model_type": "opt",
            "ffn_dim": 4 * hidden,
            "word_embed_proj_dim": hidden,
            "activation_function": "relu",
            "tie_word_embeddings": True,
        }
    spec = llama(int(random.integers(1, 7)), hidden, vocab_size=int(random.integers(100, 30000)), **changes)
    job = Job(int(random.integers(1, 300)), int(random.integers(1, 6)), int(random.integers(1, 13)))
    machine = workstation() if random.integers(2) else laptop()
    bits = int(random.choice([0, 0, 4, 8]))
    quantisation = Quantisation(Scheme(4 if bits == 4 else 8, 32)) if bits else None
    return Task(
        model="m",
        spec=spec,
        hardware=machine,
        job=job,
        dtype=torch.bfloat16,
        quantisation=quantisation,
        memory_bytes=int(2 ** random.uniform(23, 28)),
        host_bytes=int(2 ** random.uniform(25, 30)) if machine.separate else None,
        disk_bytes=GIB,
        kv_int4=bool(random.integers(2)),
    )


@pytest.mark.parametrize("seed", range(200))
def test_no_plan_runs_out_of_memory(seed: int) -> None:
    given = triple(seed)
    try:
        plan = make_plan(given)
    except OutOfMemoryError:
        return
    config = plan.config(given.base())
    parts, *_ = build_simulated(config, given.sizes, given.hardware)
    libraries = parts.tiers["device"].by_use()["libraries"]
    parts.close()
    job = replace(given.job, gen_len=min(2, given.job.gen_len), n_sequences=config.max_sequences)
    with LiveBytes() as live:
        simulate(config, given.sizes, given.hardware, job)
    most = (config.memory_bytes or 0) + (config.host_bytes or 0) - libraries
    assert live.peak <= most, f"{live.peak} bytes lived; {plan.summary()}"


def test_the_plan_names_everything_it_decides() -> None:
    plan = make_plan(task(spec=llama(8, 512)))
    config = plan.config()
    assert isinstance(config, EngineConfig)
    assert config.weights is not None
    assert config.context == JOB.context
