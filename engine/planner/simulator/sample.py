"""A simulation of a large model's job in seconds: few layers and few sweeps of it, and a straight line through them.

Layers are alike and spread alike over the tiers, so the time of a sweep is a straight line in their number; it grows
with the positions so nearly evenly that sweeps at the mean position stand for all of them.
"""

from collections.abc import Sequence
from dataclasses import replace

from ...config import TIERS, EngineConfig, TierName
from ...placement import Placement
from ...sizes import Sizes
from ...units import Unit
from ..costs import Kind
from ..hardware import Hardware
from ..job import Job
from ..places import compact, in_parts, spread
from .run import Simulation, build_simulated, simulate

EVENTS = 20_000
"""Visits of a cohort to a layer up to which a job is simulated as it is: a second or two."""
PERIODS = range(4, 7)
"""Numbers of layers of which one is found that has the tiers in about the proportions of the whole. It is simulated
once and twice over, and the line through both times leads to all layers."""
SWEEPS = 1
"""Decode sweeps that are simulated in place of all."""


def predict_run(config: EngineConfig, sizes: Sizes, hardware: Hardware, job: Job) -> Simulation:
    """``simulate``, or for what would take long a sample of it. Memory is asked for in full either way; the timeline
    is that of the sample. Raises as ``simulate``."""
    n_layers = sizes.spec.n_layers
    if not is_sampled(config, n_layers, job):
        return simulate(config, sizes, hardware, job)
    whole = build_simulated(config, sizes, hardware)
    whole.parts.close()
    pattern = _pattern(whole.placement, n_layers)
    prefills, decodes = [], []
    for times in (1, 2):
        shallow = replace(sizes, spec=sizes.spec.cut(times * len(pattern)))
        thin = replace(config, weights=_repeated(whole.placement, pattern * times))
        prefills.append(simulate(thin, shallow, hardware, replace(job, gen_len=1)))
        decodes.append(_decode(thin, shallow, hardware, job) if job.gen_len > 1 else prefills[-1])
    share = n_layers / len(pattern)
    tokens, sweeps = job.n_sequences * job.gen_len, job.gen_len - 1
    return Simulation(
        prefill_s=_line([one.prefill_s for one in prefills], share),
        decode_s=_line([one.decode_s for one in decodes], share) * sweeps / min(SWEEPS, max(1, sweeps)),
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
    positions = job.prompt_len + 1 + (job.gen_len - 1 - sweeps) // 2
    middle = Job(positions, sweeps, job.n_sequences)
    return simulate(replace(config, schedule="zigzag"), sizes, hardware, middle, prefilled=True)


Layer = tuple[TierName, TierName]
"""Where a layer's attention and MLP are."""


def _pattern(placement: Placement, n_layers: int) -> list[Layer]:
    """A few layers like all of them: of the PERIODS that which is nearest to the proportions."""
    kinds: tuple[Kind, ...] = ("attention", "mlp")
    of = {kind: [placement[Unit(kind, number)] for number in range(n_layers)] for kind in kinds}
    shares = {kind: {tier: tiers.count(tier) / n_layers for tier in TIERS} for kind, tiers in of.items()}
    counted = {n: {kind: in_parts(share, n) for kind, share in shares.items()} for n in PERIODS}

    def error(n: int) -> float:
        return sum(abs(counted[n][kind][tier] / n - shares[kind][tier]) for kind in shares for tier in TIERS)

    best = min(PERIODS, key=lambda n: (round(error(n), 3), n))
    return list(zip(*(spread(counted[best][kind]) for kind in kinds), strict=True))


def _repeated(placement: Placement, layers: Sequence[Layer]) -> dict[TierName, list[str]]:
    """A placement of so many layers, its tables where they are in ``placement``."""
    tiers: dict[TierName, list[str]] = {}
    for table in (Unit("embedding"), Unit("head")):
        tiers.setdefault(placement[table], []).append(str(table))
    for number, (attention, mlp) in enumerate(layers):
        tiers.setdefault(attention, []).append(str(Unit("attention", number)))
        tiers.setdefault(mlp, []).append(str(Unit("mlp", number)))
    return {tier: compact(names) for tier, names in tiers.items()}


def _line(values: list[float], at: float) -> float:
    """The straight line through the values at 1 and 2."""
    return max(values[0] + (values[1] - values[0]) * (at - 1), 0.0)


def is_sampled(config: EngineConfig, n_layers: int, job: Job) -> bool:
    """Whether ``predict_run`` takes a sample, whose decode is that of a block that begins and ends together."""
    return n_layers > 2 * PERIODS[0] and _visits(config, n_layers, job, job.gen_len - 1) > EVENTS


def visits(config: EngineConfig, n_layers: int, job: Job) -> int:
    """About how many visits of a cohort to a layer ``predict_run`` simulates."""
    if is_sampled(config, n_layers, job):
        return _visits(config, 3 * PERIODS[len(PERIODS) // 2], job, SWEEPS)
    return _visits(config, n_layers, job, job.gen_len - 1)


def _visits(config: EngineConfig, n_layers: int, job: Job, sweeps: int) -> int:
    away = config.kv_host_tokens or config.kv_disk_tokens  # where a sequence is attended to or brought by itself
    cohorts = config.max_sequences if away else 1 + config.max_sequences // 64
    blocks = -(-job.n_sequences // config.max_sequences)
    return n_layers * blocks * (config.max_sequences + sweeps * cohorts)
