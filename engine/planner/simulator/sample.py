"""A simulation of a large model's job in seconds: few layers and few sweeps of it, and a straight line through them.

Layers are alike and spread alike over the tiers, so the time of a sweep is a straight line in their number; it grows
with the positions so nearly evenly that sweeps at the mean position stand for all of them.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from ...budget import divide
from ...config import EngineConfig, TierName
from ...quant.format import Quantisation
from ...sizes import Sizes
from ...spec import ModelSpec
from ...units import Unit
from ..hardware import Hardware
from ..job import Job
from ..places import compact
from .run import Simulation, build_simulated, simulate

EVENTS = 20_000
"""Visits of a cohort to a layer up to which a job is simulated as it is: a second or two."""
DEPTHS = (4, 8)
"""Layers that are simulated in place of all."""
SWEEPS = 2
"""Decode sweeps that are simulated in place of all."""


def predict_run(
    config: EngineConfig,
    spec: ModelSpec,
    hardware: Hardware,
    job: Job,
    dtype: torch.dtype,
    quantisation: Quantisation | None = None,
) -> Simulation:
    """``simulate``, or for what would take long a sample of it. Memory is asked for in full either way; the timeline
    is that of the sample. Raises as ``simulate``."""
    if _events(config, spec, job) <= EVENTS or spec.n_layers <= DEPTHS[-1]:
        return simulate(config, spec, hardware, job, dtype, quantisation)
    parts, _ = build_simulated(config, spec, hardware, dtype, quantisation)
    memory = {name: tier.by_use() for name, tier in parts.tiers.items()}
    placement = divide(config, Sizes(spec, dtype, quantisation), parts.device).placement
    parts.close()
    at = [_sampled(config, spec, hardware, job, dtype, quantisation, placement, depth) for depth in DEPTHS]
    prefill_s = _line([prefill_s for prefill_s, _, _ in at], spec.n_layers)
    decode_s = _line([decode_s for _, decode_s, _ in at], spec.n_layers)
    tokens = job.n_sequences * job.gen_len
    timeline = at[-1][2].timeline
    return Simulation(
        prefill_s, decode_s, tokens - job.n_sequences, tokens, at[-1][2].sweeps, timeline, memory, sampled=True
    )


def _sampled(
    config: EngineConfig,
    spec: ModelSpec,
    hardware: Hardware,
    job: Job,
    dtype: torch.dtype,
    quantisation: Quantisation | None,
    placement: Mapping[Unit, TierName],
    depth: int,
) -> tuple[float, float, Simulation]:
    """Seconds of prefill and of all decode sweeps with so many layers."""
    shallow = replace(spec, n_layers=depth, windows=spec.windows[:depth])
    thin = replace(config, weights=_thinned(placement, spec.n_layers, depth))
    first = replace(job, gen_len=1)
    prefill = simulate(thin, shallow, hardware, first, dtype, quantisation)
    if job.gen_len == 1:
        return prefill.prefill_s, 0.0, prefill
    length = job.prompt_len + max(0, job.gen_len // 2 - SWEEPS // 2)
    middle = Job(min(length, job.context - SWEEPS - 1), min(SWEEPS + 1, job.gen_len), job.n_sequences)
    decode = simulate(thin, shallow, hardware, middle, dtype, quantisation)
    sweeps = middle.gen_len - 1
    return prefill.prefill_s, decode.decode_s / sweeps * (job.gen_len - 1), decode


def _thinned(placement: Mapping[Unit, TierName], n_layers: int, depth: int) -> dict[TierName, list[str]]:
    """The placement of ``depth`` layers, each kind in the proportions that all of them have."""
    tiers: dict[TierName, list[str]] = {}
    for unit, tier in placement.items():
        if unit.kind in ("embedding", "head"):
            tiers.setdefault(tier, []).append(str(unit))
    for kind in ("attention", "mlp"):
        of_kind = [tier for unit, tier in placement.items() if unit.kind == kind]
        for number in range(depth):
            tier = of_kind[int((number + 0.5) * n_layers / depth)]
            tiers.setdefault(tier, []).append(str(Unit("attention" if kind == "attention" else "mlp", number)))
    return {tier: compact(names) for tier, names in tiers.items()}


def _line(values: list[float], at: int) -> float:
    """The straight line through the values at DEPTHS."""
    (x0, x1), (y0, y1) = DEPTHS, values
    return max(y0 + (y1 - y0) / (x1 - x0) * (at - x0), 0.0)


def _events(config: EngineConfig, spec: ModelSpec, job: Job) -> int:
    staged = config.kv_disk_tokens or (config.kv_host_tokens and not config.delegate)
    cohorts = config.max_sequences if staged else 1 + config.max_sequences // 64
    blocks = -(-job.n_sequences // config.max_sequences)
    return spec.n_layers * blocks * (config.max_sequences + (job.gen_len - 1) * cohorts)
