"""From a task to a plan, with what is expected of it and why the others lost."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..config import DTYPES, EngineConfig, TierName
from ..errors import ConfigError
from .plan import Plan, Prediction, Rejected
from .search import Progress, Tried, busy_shares, search
from .simulator.run import Simulation
from .simulator.sample import predict_run
from .task import Task

SEEN = 0.01
"""Shares of a token's time below this are no reason."""
SHOWN = 3
"""Plans that lost, of those a plan tells about."""


def make_plan(task: Task, progress: Progress | None = None) -> Plan:
    """The best plan for a task. Raises as ``search``; ``progress`` is told of options done and of all."""
    found = search(task, progress)
    best = found.ranked[0]
    made = Plan.of(best.config, task.hardware.name, task.job)
    prediction = predict(task, best.config, best.simulation)
    rejected = tuple(_rejected(task, best, lost) for lost in found.ranked[1 : SHOWN + 1])
    return replace(made, prediction=prediction, rejected=rejected, tried=found.options)


def check_plan(plan: Plan, task: Task) -> Plan:
    """A plan with what is expected of it, whoever wrote it.

    Raises ConfigError for a setting that makes no sense and OutOfMemoryError with the terms of what does not fit.
    """
    config = plan.config(task.base()).validate()
    task = replace(task, job=plan.job, dtype=_dtype(config, task)).validate()
    if config.context is not None and config.context < plan.job.context:
        raise ConfigError(
            f"context is {config.context}; this plan's job has {plan.job.context} positions (prompt_len "
            f"{plan.job.prompt_len}, gen_len {plan.job.gen_len}). Raise context, or shorten the job"
        )
    simulation = predict_run(config, task.sizes, task.hardware, task.block(config))
    prediction = predict(task, config, simulation)
    return replace(plan, model=task.model, hardware=task.hardware.name, prediction=prediction)


def _dtype(config: EngineConfig, task: Task) -> torch.dtype:
    """What a configuration computes in. Raises ConfigError for a type that the machine has no rates of."""
    if config.dtype == "auto":
        return task.dtype
    known = [name for name in DTYPES if name in task.hardware.device.products]
    if config.dtype not in known:
        raise ConfigError(
            f"dtype is '{config.dtype}'; rates of '{task.hardware.name}' are known for {', '.join(known)}"
        )
    found = getattr(torch, config.dtype)
    assert isinstance(found, torch.dtype)
    return found


def predict(task: Task, config: EngineConfig, simulation: Simulation) -> Prediction:
    """What a simulated run says."""
    busy = busy_shares(simulation.timeline)
    working = {name: share for name, share in busy.items() if name != "waiting"}
    first = next(iter(working), "device")
    capacities = {"device": config.memory_bytes, "host": config.host_bytes, "disk": config.disk_bytes}
    memory: dict[TierName, Mapping[str, int]] = {
        tier: {**uses, "capacity": capacities[tier] or 0} for tier, uses in simulation.memory.items() if uses
    }
    return Prediction(
        prefill_s=simulation.prefill_s,
        decode_s=simulation.decode_s,
        throughput=task.throughput(simulation),
        decode_throughput=simulation.decode_throughput,
        latency_s=simulation.total_s,
        bound=f"{first}, busy {working.get(first, 0.0):.0%} of the time",
        busy=busy,
        memory=memory,
    )


def _rejected(task: Task, winner: Tried, lost: Tried) -> Rejected:
    plan = Plan.of(lost.config, task.hardware.name, task.job)
    throughput = task.throughput(lost.simulation)
    ratio = task.throughput(winner.simulation) / throughput
    mine, theirs = (_busy_a_token(one.simulation) for one in (lost, winner))
    more = {name: seconds - theirs.get(name, 0.0) for name, seconds in mine.items() if name != "waiting"}
    worst = max(more, key=lambda name: more[name], default="device")
    reason = f"{ratio:.2f} times the time for a token"
    if ratio > 1 + SEEN and more and more[worst] > SEEN * sum(mine.values()):
        reason += f": {worst} takes {mine[worst] * 1e3:.2f} ms of it instead of {theirs.get(worst, 0.0) * 1e3:.2f}"
    return Rejected(plan.summary(), throughput, reason)


def _busy_a_token(simulation: Simulation) -> dict[str, float]:
    """Seconds that each resource is busy for a token."""
    seconds = simulation.total_s / simulation.tokens
    return {name: share * seconds for name, share in busy_shares(simulation.timeline).items()}
