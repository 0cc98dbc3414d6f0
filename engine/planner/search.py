"""The search for a plan: options one by one, a placement for each, and the best of them carried out in simulation."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..budget import SLOTS, Terms
from ..config import TILE_ROWS, EngineConfig, TierName, format_bytes
from ..errors import ConfigError, HeliosError, OutOfMemoryError
from ..kv import BLOCK, blocks_for
from .costs import CostModel, Option, kv_blocks_of
from .places import compact
from .placing import KINDS, Counts, Room, Shape, named_units, place
from .simulator.clock import Busy
from .simulator.device import SimulatedDevice
from .simulator.run import Simulation
from .simulator.sample import predict_run
from .task import Task

BLOCKS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Sizes of blocks that are tried."""
PREFILL_ROWS = (512, 4096, 131072)
"""Prompt rows of a sweep that are tried: more of them read the weights less often and take more memory."""
COARSE = 3
"""At first one block size of so many is tried, then those around the best."""
PROMISING = 2
"""Block sizes whose neighbourhood is searched."""
FINALISTS = 5
"""The plans that are carried out in simulation."""
ALIKE = 2
"""Of them, those that may have the same block size while there are others."""
ACTIVATION_SHARE = 0.15
"""Of the device's memory, what hidden states may take before they go to another tier."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration, and what the cost model says of it."""

    option: Option
    config: EngineConfig
    counts: Counts

    @property
    def second_per_sequence(self) -> float:
        return self.counts.total_s / self.option.block


@dataclass(frozen=True, slots=True)
class Tried:
    """A configuration that was carried out in simulation."""

    config: EngineConfig
    simulation: Simulation


@dataclass(frozen=True, slots=True)
class Found:
    """The plans that were carried out, the best one first."""

    ranked: tuple[Tried, ...]
    candidates: tuple[Candidate, ...]
    """Those that the cost model tells of, likewise."""
    options: int
    """Options that were solved for."""


def search(task: Task, progress: Progress | None = None) -> Found:
    """Find the plan with the highest throughput within the limits.

    Raises ConfigError for a job that the model cannot do, and OutOfMemoryError saying the least memory that would do.
    """
    task.validate()
    model = CostModel(task.sizes, task.hardware, task.job)
    solved: dict[Option, Candidate | None] = {}

    def solve(options: Iterable[Option]) -> list[Candidate]:
        for option in options:
            if option not in solved:
                solved[option] = _candidate(task, model, option)
                if progress:
                    progress(len(solved), len(solved) + FINALISTS)
        return sorted((one for one in solved.values() if one), key=lambda one: one.second_per_sequence)

    blocks = [n for n in BLOCKS if n < task.job.n_sequences] + [min(task.job.n_sequences, BLOCKS[-1])]
    found = solve(_coarse(task, blocks))
    found = solve(_fine(task, blocks, [one.option.block for one in found[:PROMISING]] or blocks[:PROMISING]))
    found = solve(_staggered(task, found[:PROMISING]))
    tried: list[Tried] = []
    for config in _by_promise(found):
        if len(tried) == FINALISTS or (tried and tried[0].simulation.sampled):  # which takes seconds
            break
        tried += _try(task, config)
        if progress:
            progress(len(solved) + len(tried), len(solved) + FINALISTS)
    for config in _simplest(task, {one.config.max_sequences for one in tried} or {1}):
        tried += _try(task, config)
    if not tried:
        raise _nothing_fits(task, model)
    tried.sort(key=lambda one: -task.throughput(one.simulation))
    return Found(tuple(tried), tuple(found), len(solved))


def _try(task: Task, config: EngineConfig) -> list[Tried]:
    """The configuration carried out, if it fits and keeps to the limit."""
    try:
        simulation = predict_run(config, task.sizes, task.hardware, task.block(config))
    except OutOfMemoryError:
        return []
    within = task.latency_limit_s is None or simulation.total_s <= task.latency_limit_s
    return [Tried(config, simulation)] if within else []


def _coarse(task: Task, blocks: Sequence[int]) -> Iterator[Option]:
    """Blocks far apart, each with as many prompt rows in a sweep as may be."""
    for block in {*blocks[::COARSE], blocks[-1]}:
        yield _option(task, block, PREFILL_ROWS[-1])


def _fine(task: Task, blocks: Sequence[int], best: Sequence[int]) -> Iterator[Option]:
    """Blocks of about the best sizes, in every way but one after another."""
    near = {at + step for block in best for at in [blocks.index(block)] for step in range(1 - COARSE, COARSE)}
    for at in sorted(near & set(range(len(blocks)))):
        for prefill_rows in PREFILL_ROWS:
            for delegate in (True, False) if task.hardware.separate else (True,):
                for kv_int4 in (False, True) if task.kv_int4 else (False,):
                    yield _option(task, blocks[at], prefill_rows, delegate, kv_int4)


def _staggered(task: Task, best: Sequence[Candidate]) -> Iterator[Option]:
    """The best ones as diagonal blocks, where there are sequences for more than one block."""
    for candidate in best:
        if task.job.n_sequences >= 2 * candidate.option.block > 2:
            yield replace(candidate.option, schedule="diagonal")


def _option(task: Task, block: int, prefill_rows: int, delegate: bool = True, kv_int4: bool = False) -> Option:
    rows = min(prefill_rows, block * task.job.prompt_len)
    activations = _activations(task, rows + block)
    return Option(block, rows, "continuous", delegate, kv_int4, activations, task.read_ahead)


def _activations(task: Task, rows: int) -> TierName:
    """Where so many rows' hidden states go."""
    size = 2 * rows * task.stage.hidden_size * task.dtype.itemsize
    if size <= ACTIVATION_SHARE * (task.base().memory_bytes or 0) or rows <= TILE_ROWS:
        return "device"
    return "host" if task.hardware.separate else "disk"


def _config(task: Task, option: Option) -> EngineConfig:
    """Without weights and KV."""
    config = replace(
        task.base(),
        max_sequences=option.block,
        max_queued=max(option.block, task.base().max_queued),
        prefill_rows=option.prefill_rows,
        schedule=option.schedule,
        delegate=option.delegate,
        kv_dtype="int4" if option.kv_int4 else "auto",
    )
    if option.activations == "device":
        return config
    tile = min(config.tile_rows, option.prefill_rows + option.block)
    rows = -(-(option.prefill_rows + option.block) // tile) * tile
    if option.activations == "host":
        return replace(config, activation_rows=0, activation_host_rows=rows)
    return replace(config, activation_rows=0, activation_disk_rows=rows)


def _candidate(task: Task, model: CostModel, option: Option) -> Candidate | None:
    """The best placement under an option, if there is one."""
    config, spec = _config(task, option), task.stage
    device = SimulatedDevice.of(task.hardware, task.dtype, option.kv_int4)
    capacity = config.memory_bytes or 0
    terms = Terms.of(config, model.sizes, device, capacity, task.job.context)
    kv_tiers: list[TierName] = ["device"]
    if config.host_bytes:
        kv_tiers.append("host")
    if config.disk_bytes and task.hardware.disk_read:
        kv_tiers.append("disk")
    kv_blocks = task.stages * kv_blocks_of(option, task.job)
    shape = Shape(
        n_layers=spec.n_layers,
        unit_bytes={kind: model.weights_bytes(kind) for kind in KINDS},
        tied=spec.tied,
        block=option.block,
        kv_bytes=kv_blocks * model.block_bytes(option),
        kv_tiers=kv_tiers,
        staged=[tier for tier in kv_tiers if tier == "disk" or (tier == "host" and not option.delegate)],
    )
    slots = 2 * (terms.weight_slots * terms.weight_slot + 2 * SLOTS * terms.kv_slot) if task.hardware.separate else 0
    room = Room(
        device=capacity - terms.fixed_bytes,
        host=max(0, (config.host_bytes or 0) - _host_buffers(task, config, terms.scratch, slots)),
        disk=config.disk_bytes or 0,
        loading=terms.slots_bytes(False),
        streaming=terms.slots_bytes(True),
        kv_slots=SLOTS * terms.kv_slot,
    )
    counts = place(shape, model.costs(option), room, option.read_ahead, task.latency_limit_s)
    if counts is None:
        return None
    return Candidate(option, _placed(task, config, option, counts, kv_blocks), counts)


def _host_buffers(task: Task, config: EngineConfig, scratch: int, slots: int) -> int:
    """Bytes of host memory that are neither weights nor KV."""
    if not config.host_bytes:
        return 0
    rows = config.activation_host_rows * task.stage.hidden_size * task.dtype.itemsize
    return (scratch if task.hardware.separate else 0) + slots + rows


def _placed(task: Task, config: EngineConfig, option: Option, counts: Counts, kv_blocks: float) -> EngineConfig:
    """The configuration with weights and KV where the counts say."""
    tokens = {tier: int(-(-n * kv_blocks // 1)) * BLOCK for tier, n in counts.sequences.items()}
    for tier in ("host", "disk"):  # a sequence there gets the blocks of its whole life
        if option.schedule == "diagonal" and tokens.get(tier):
            tokens[tier] = max(tokens[tier], blocks_for(task.job.context) * BLOCK)
    return replace(
        config,
        weights={tier: compact(names) for tier, names in named_units(task.stage.n_layers, counts).items()},
        kv_tokens=tokens.get("device", 0),
        kv_host_tokens=tokens.get("host", 0),
        kv_disk_tokens=tokens.get("disk", 0),
    )


def _by_promise(found: Sequence[Candidate]) -> Iterator[EngineConfig]:
    """The candidates, best first, of each block size the two best before any third."""
    seen: dict[int, int] = {}
    later = []
    for candidate in found:
        seen[candidate.option.block] = seen.get(candidate.option.block, 0) + 1
        if seen[candidate.option.block] <= ALIKE:
            yield candidate.config
        else:
            later.append(candidate.config)
    yield from later


def _simplest(task: Task, blocks: set[int]) -> list[EngineConfig]:
    """What an engine does that is told nothing but how many sequences to run."""
    context = blocks_for(task.job.context) * BLOCK
    return [replace(task.base(), max_sequences=block, kv_tokens=block * context) for block in sorted(blocks)]


def _nothing_fits(task: Task, model: CostModel) -> HeliosError:
    """The least that would do: one sequence with everything that may be elsewhere elsewhere."""
    spec, job = task.stage, task.job
    if task.latency_limit_s is not None:
        return ConfigError(
            f"no plan makes {job.gen_len} tokens for prompts of {job.prompt_len} within latency_limit "
            f"{task.latency_limit_s:g} s on '{task.hardware.name}'; raise it, or the memory, or shorten the job"
        )
    least = replace(
        task.base(), max_sequences=1, prefill_rows=min(512, job.prompt_len), kv_tokens=blocks_for(job.context) * BLOCK
    )
    simulated, capacity = SimulatedDevice.of(task.hardware, task.dtype), least.memory_bytes or 0
    terms = Terms.of(least, model.sizes, simulated, capacity, job.context)
    device = terms.fixed_bytes + terms.slots_bytes(True) + blocks_for(job.context) * terms.kv_block
    return OutOfMemoryError(
        f"no plan fits {format_bytes(capacity)} on the device of '{task.hardware.name}'; one sequence of "
        f"{job.context} positions with all weights elsewhere takes about {format_bytes(device)} there. Raise the "
        f"memory, shorten the job, or take a smaller or quantised model ({spec.n_layers} layers of "
        f"{spec.hidden_size} now)"
    )


def busy_shares(timeline: Sequence[Busy]) -> dict[str, float]:
    """For each resource, the share of the time in which it was busy, the busiest first."""
    busy: dict[str, float] = {}
    for one in timeline:
        busy[one.resource] = busy.get(one.resource, 0.0) + one.end_s - one.start_s
    total_s = max((one.end_s for one in timeline), default=1.0) - min((one.start_s for one in timeline), default=0.0)
    shares = {name: seconds / total_s for name, seconds in busy.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
