"""Plans for small budgets, carried out for real on this machine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import OutOfMemoryError
from engine.llm import LLM
from engine.planner.job import Job
from engine.planner.picture import draw
from engine.planner.planner import make_plan
from engine.planner.task import Task
from engine.planner.trial import carry_out
from engine.request import SamplingParams
from engine.spec import ModelSpec
from tests.engine.test_parity import random_tokens

from .machines import laptop

MB = 10**6
JOB = Job(40, 12, 6)
PARAMS = SamplingParams(temperature=0, max_tokens=JOB.gen_len, ignore_eos=True)


def task(model: Path, memory_bytes: int) -> Task:
    spec = ModelSpec.from_directory(model)
    return Task(str(model), spec, laptop(), JOB, torch.bfloat16, memory_bytes=memory_bytes, disk_bytes=100 * MB)


@pytest.mark.parametrize("name", ["llama", "opt", "llama-one-kv-head-tied"])
def test_plans_from_the_least_memory_up_run_within_it_and_say_the_same(
    tiny_model: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    model = tiny_model(name)
    prompts = [random_tokens(JOB.prompt_len, seed=seed) for seed in range(JOB.n_sequences)]
    with LLM(model, dtype="float32", threads=1) as llm:
        expected = [[token.id for token in done.tokens] for done in llm.generate(prompts, PARAMS)]
    budgets = [n * MB // 20 for n in range(10, 60, 4)]
    tried = []
    for budget in budgets:
        given = task(model, budget)
        try:
            plan = make_plan(given)
        except OutOfMemoryError:
            assert not tried, "what fits in less fits in more"
            continue
        config = replace(plan.config(given.base()), offload_dir=str(tmp_path), threads=1)
        with LLM.of(config) as llm:
            tier = llm.engine.tiers["device"]
            assert sum(tier.by_use().values()) <= tier.capacity_bytes <= budget
            assert all(done.finish_reason == "length" for done in llm.generate(prompts, PARAMS))
        with LLM.of(replace(config, dtype="float32", memory_bytes=2 * budget)) as llm:
            assert [[token.id for token in done.tokens] for done in llm.generate(prompts, PARAMS)] == expected
        tried.append(plan.summary())
    assert len(tried) > 3
    assert any("on disk" in summary for summary in tried)


def test_a_trial_says_how_long_what_took_and_what_was_busy(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    config = EngineConfig(
        str(tiny_model("llama")), dtype="float32", kv_tokens=0, kv_disk_tokens=600, max_sequences=4, context=60,
        offload_dir=str(tmp_path), weights={"disk": ["embedding", "layers.0-2", "head"]}, prefill_rows=50,
    )  # fmt: skip
    told: list[tuple[int, int]] = []
    found = carry_out(config, Job(40, 8, 6), lambda done, total: told.append((done, total)))
    assert told[-1] == (48, 48)
    assert found.throughput == pytest.approx(48 / found.latency_s)
    assert 0 < found.prefill_s < found.latency_s == pytest.approx(found.prefill_s + found.decode_s)
    begun_s, end_s = found.shown_s
    assert 0 < begun_s < end_s <= found.latency_s + 1
    assert {busy.resource for busy in found.timeline} == {"device", "waiting", "disk read", "disk write"}
    draw(found.timeline, tmp_path / "run.png", "a run", *found.shown_s)
    assert (tmp_path / "run.png").stat().st_size > 1000
