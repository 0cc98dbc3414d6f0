"""The search for a plan: the most promising candidates are carried out in simulation, then those about the best."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ..budget import Terms, divide
from ..config import EngineConfig, format_bytes
from ..errors import ConfigError, HeliosError, OutOfMemoryError
from ..kv import BLOCK, blocks_for
from ..placement import grouped
from .costs import CostModel, Option
from .options import Candidate, Candidates, in_turn
from .places import compact
from .simulator.clock import Busy
from .simulator.device import SimulatedDevice
from .simulator.run import Simulation
from .simulator.sample import is_sampled, predict_run, visits
from .task import Task

FINALISTS = 5
"""Candidates that are simulated whatever they are, if VISITS allow it."""
TRIALS = 16
"""Simulations at most, those about the best one included."""
ROUNDS = 40
VISITS = 22_000
"""Simulated visits of a cohort to a layer at most, all trials together: some 5 seconds."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Tried:
    """A configuration that was carried out in simulation."""

    config: EngineConfig
    simulation: Simulation
    option: Option | None = None
    """None if it is no candidate's."""


@dataclass(frozen=True, slots=True)
class Found:
    """The plans that were carried out, the best one first."""

    ranked: tuple[Tried, ...]
    candidates: tuple[Candidate, ...]
    """Those that the cost model tells of, likewise."""
    options: int
    """Options that were solved for."""


class _Trials:
    """Simulations of one task, as many as its effort allows."""

    def __init__(self, task: Task, progress: Callable[[int], None]) -> None:
        self.task = task
        self.done: list[Tried] = []
        self.soonest_s: float | None = None
        """The shortest latency of those that took longer than the limit."""
        self._configs: list[EngineConfig] = []
        self._left, self._progress = VISITS, progress

    @property
    def best(self) -> Tried:
        return max(self.done, key=lambda one: self.task.throughput(one.simulation))

    @property
    def number(self) -> int:
        return len(self._configs)

    def run(self, config: EngineConfig, option: Option | None = None) -> bool:
        """Carry the configuration out, unless it was or takes more effort than is left; False when TRIALS are done."""
        if config in self._configs:
            return True
        job = self.task.block(config)
        cost = visits(config, self.task.stage.n_layers, job)
        if len(self._configs) == TRIALS:
            return False
        sampled = is_sampled(config, self.task.stage.n_layers, job)
        staggered = option is not None and option.schedule == "diagonal"
        if (self.done and cost > self._left) or (sampled and staggered):  # a sample says nothing of who comes when
            return True
        self._configs.append(config)
        self._left -= cost
        try:
            simulation = predict_run(config, self.task.sizes, self.task.hardware, job)
        except OutOfMemoryError:
            return True
        self._progress(len(self._configs))
        if self.task.latency_limit_s is None or simulation.total_s <= self.task.latency_limit_s:
            self.done.append(Tried(config, simulation, option))
        else:
            self.soonest_s = min(simulation.total_s, self.soonest_s or simulation.total_s)
        return True


def search(task: Task, progress: Progress | None = None) -> Found:
    """Find the plan with the highest throughput within the limits.

    Raises ConfigError for a job that the model cannot do, and OutOfMemoryError saying the least memory that would do.
    """
    task.validate()
    candidates = Candidates(task, lambda done: progress(done, done + TRIALS) if progress else None)
    found = candidates.promising()
    trials = _Trials(
        task, lambda done: progress(len(candidates) + done, len(candidates) + TRIALS) if progress else None
    )
    for candidate in in_turn(found):
        if trials.number == FINALISTS or not trials.run(candidate.config, candidate.option):
            break
    for config in _simplest(task, {one.config.max_sequences for one in trials.done} or {1}):
        trials.run(config)
    if not trials.done:
        raise _nothing_fits(task, candidates.model, trials.soonest_s)
    while _improved(trials, candidates):
        pass
    ranked = sorted(trials.done, key=lambda one: -task.throughput(one.simulation))
    return Found(tuple(ranked), tuple(found), len(candidates))


def _improved(trials: _Trials, candidates: Candidates) -> bool:
    """Whether a neighbour of the best plan is better and effort is left."""
    best = trials.best
    if best.option is None:
        return False
    for candidate in candidates.neighbours(best.option):
        if not trials.run(candidate.config, candidate.option):
            return False
        if trials.best is not best:
            return True
    return False


def _simplest(task: Task, blocks: set[int]) -> list[EngineConfig]:
    """What an engine does that is told nothing but how many sequences to run."""
    context = blocks_for(task.job.context) * BLOCK
    made = []
    for block in sorted(blocks):
        config = replace(task.base(), max_sequences=block, kv_tokens=block * context)
        with suppress(OutOfMemoryError):
            device = SimulatedDevice.of(task.hardware, task.dtype)
            placed = grouped(divide(config, task.sizes, device).placement)
            made.append(replace(config, weights={tier: compact(names) for tier, names in placed.items()}))
    return made


def _nothing_fits(task: Task, model: CostModel, soonest_s: float | None) -> HeliosError:
    """Why there is no plan. ``soonest_s`` is the shortest latency of those that took too long."""
    job = task.job
    if soonest_s is None and task.latency_limit_s is not None:  # nothing was simulated: is it the limit, or the memory?
        try:
            found = search(replace(task, latency_limit_s=None))
        except HeliosError as error:
            return error
        soonest_s = min(one.simulation.total_s for one in found.ranked)
    if soonest_s is not None:
        return ConfigError(
            f"no plan makes {job.gen_len} tokens for prompts of {job.prompt_len} within latency_limit "
            f"{task.latency_limit_s:g} s on '{task.hardware.name}'; the quickest one tried takes {soonest_s:.3g} s. "
            "Raise the limit or the memory, or shorten the job"
        )
    device, capacity = _least(task, model), task.base().memory_bytes or 0
    asked = f"one sequence of {job.context} positions with all weights elsewhere takes {_rounded(device)} there"
    if device <= capacity:
        away = model.sizes.all_matrices
        return OutOfMemoryError(
            f"no plan fits '{task.hardware.name}': {asked} of {format_bytes(capacity)}, and what is elsewhere, up to "
            f"{format_bytes(away)} of weights and the buffers they pass through, does not fit the host's "
            f"{format_bytes(task.base().host_bytes or 0)}"
            + ("" if task.hardware.disk_read else ", and there is no disk")
            + ". Raise one of them"
        )
    return OutOfMemoryError(
        f"no plan fits {format_bytes(capacity)} on the device of '{task.hardware.name}'; {asked}. Raise the memory, "
        f"shorten the job, or take a smaller or quantised model ({task.stage.n_layers} layers of "
        f"{task.stage.hidden_size} now)"
    )


def _least(task: Task, model: CostModel) -> int:
    """Device memory that one sequence takes if all that may be elsewhere is. What libraries are given grows with it."""
    job, need = task.job, task.base().memory_bytes or 0
    for _ in range(ROUNDS):
        least = replace(
            task.base(), memory_bytes=need, max_sequences=1, prefill_rows=min(512, job.prompt_len),
            kv_tokens=blocks_for(job.context) * BLOCK,
        )  # fmt: skip
        terms = Terms.of(least, model.sizes, SimulatedDevice.of(task.hardware, task.dtype), need, job.context)
        found = terms.fixed_bytes + terms.slots_bytes(True) + blocks_for(job.context) * terms.kv_block
        if found <= need:
            break
        need = found
    return need if found > need else found


def _rounded(count: int) -> str:
    """Up to a whole MiB, or of little to a KiB."""
    unit, name = (2**20, "MiB") if count > 2**23 else (2**10, "KiB")
    return f"{-(-count // unit)} {name}"


def busy_shares(timeline: Sequence[Busy]) -> dict[str, float]:
    """For each resource, the share of the time in which it was busy, the busiest first."""
    busy: dict[str, float] = {}
    for one in timeline:
        busy[one.resource] = busy.get(one.resource, 0.0) + one.end_s - one.start_s
    total_s = max((one.end_s for one in timeline), default=1.0) - min((one.start_s for one in timeline), default=0.0)
    shares = {name: seconds / total_s for name, seconds in busy.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
