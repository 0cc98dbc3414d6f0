"""A simulation of a large model's job in seconds: few layers and few sweeps of it, and a straight line through them.

Layers are alike and spread alike over the tiers, so the time of a sweep is a straight line in their number; it grows
with the positions so nearly evenly that sweeps at the mean position stand for all of them.
"""

from collections.abc import Mapping
from dataclasses import replace

from ...config import EngineConfig, TierName
from ...sizes import Sizes
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


def predict_run(config: EngineConfig, sizes: Sizes, hardware: Hardware, job: Job) -> Simulation:
    """``simulate``, or for what would take long a sample of it. Memory is asked for in full either way; the timeline
    is that of the sample. Raises as ``simulate``."""
    n_layers = sizes.spec.n_layers
    if _events(config, n_layers, job) <= EVENTS or n_layers <= DEPTHS[-1]:
        return simulate(config, sizes, hardware, job)
    whole = build_simulated(config, sizes, hardware)
    whole.parts.close()
    prefills, decodes = [], []
    for depth in DEPTHS:
        shallow = replace(sizes, spec=sizes.spec.cut(depth))
        thin = replace(config, weights=_thinned(whole.placement, n_layers, depth))
        prefills.append(simulate(thin, shallow, hardware, replace(job, gen_len=1)))
        decodes.append(_decode(thin, shallow, hardware, job) if job.gen_len > 1 else prefills[-1])
    tokens, sweeps = job.n_sequences * job.gen_len, job.gen_len - 1
    return Simulation(
        prefill_s=_line([one.prefill_s for one in prefills], n_layers),
        decode_s=_line([one.decode_s for one in decodes], n_layers) * sweeps / min(SWEEPS, max(1, sweeps)),
        decode_tokens=tokens - job.n_sequences,
        tokens=tokens,
        sweeps=prefills[-1].sweeps + sweeps,
        timeline=decodes[-1].timeline,
        memory=whole.memory,
        shown_s=decodes[-1].shown_s,
        sampled=True,
    )


def _decode(config: EngineConfig, sizes: Sizes, hardware: Hardware, job: Job) -> Simulation:
    """Some decode sweeps at the mean position, in which the whole block takes part."""
    sweeps = min(SWEEPS, job.gen_len - 1)
    positions = min(job.prompt_len + (job.gen_len - sweeps) // 2, job.context - sweeps - 1)
    middle = Job(positions, sweeps + 1, job.n_sequences)
    return simulate(replace(config, schedule="zigzag"), sizes, hardware, middle)


def _thinned(placement: Mapping[Unit, TierName], n_layers: int, depth: int) -> dict[TierName, list[str]]:
    """The placement of ``depth`` layers, each kind in the proportions that all of them have."""
    tiers: dict[TierName, list[str]] = {}
    for unit in placement:
        if unit.kind in ("embedding", "head"):
            tiers.setdefault(placement[unit], []).append(str(unit))
        elif unit.number < depth:
            like = unit._replace(number=int((unit.number + 0.5) * n_layers / depth))
            tiers.setdefault(placement[like], []).append(str(unit))
    return {tier: compact(names) for tier, names in tiers.items()}


def _line(values: list[float], at: int) -> float:
    """The straight line through the values at DEPTHS."""
    (x0, x1), (y0, y1) = DEPTHS, values
    return max(y0 + (y1 - y0) / (x1 - x0) * (at - x0), 0.0)


def _events(config: EngineConfig, n_layers: int, job: Job) -> int:
    staged = config.kv_disk_tokens or (config.kv_host_tokens and not config.delegate)
    cohorts = config.max_sequences if staged else 1 + config.max_sequences // 64
    blocks = -(-job.n_sequences // config.max_sequences)
    return n_layers * blocks * (config.max_sequences + (job.gen_len - 1) * cohorts)
