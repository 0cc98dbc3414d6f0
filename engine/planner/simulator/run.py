"""Running a block of requests on a simulated machine."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...batch import Batch, Tile
from ...budget import divide
from ...build import Parts, assemble
from ...config import EngineConfig, TierName
from ...errors import ConfigError, OutOfMemoryError
from ...passes.choose import sink
from ...placement import Placement
from ...request import Token
from ...scheduler import Scheduler
from ...sequence import Sequence
from ...sizes import Sizes
from ...sweep import Sweep
from ...units import Layouts
from ..costs import CostModel
from ..hardware import Hardware
from ..job import Job
from .checkpoint import SimulatedIndex
from .clock import Busy
from .device import META, SimulatedDevice
from .shortcuts import Shortcuts

_TOKEN = Token(0, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Simulation:
    """How a job would go."""

    prefill_s: float
    """Of sweeps with prompts in them."""
    decode_s: float
    decode_tokens: int
    """Made in sweeps without prompts."""
    tokens: int
    sweeps: int
    timeline: tuple[Busy, ...]
    """From the first sweep on."""
    memory: dict[TierName, dict[str, int]] = field(default_factory=dict)
    """Bytes held on each tier, by use."""
    shown_s: tuple[float, float] = (0.0, 0.0)
    """When the last of the sweeps with the most sequences and, if there is one, no prompts began and ended."""
    sampled: bool = False
    """Only some layers and sweeps were carried out, and the timeline is theirs."""

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def throughput(self) -> float:
        """Generated tokens a second, prefill included."""
        return self.tokens / self.total_s

    @property
    def decode_throughput(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


class Simulated(NamedTuple):
    """An engine's parts on a machine that is not there."""

    parts: Parts
    device: SimulatedDevice
    placement: Placement

    @property
    def memory(self) -> dict[TierName, dict[str, int]]:
        """Bytes held on each tier, by use."""
        return {name: tier.by_use() for name, tier in self.parts.tiers.items()}


def build_simulated(config: EngineConfig, sizes: Sizes, hardware: Hardware) -> Simulated:
    """``build.build`` for a model of which there are only ``sizes``. Raises as ``budget.divide``."""
    device = SimulatedDevice.of(hardware, sizes.dtype)
    budget = divide(config, sizes, device)
    if not hardware.disk_read:
        _refuse_disk(hardware, config, budget.placement)
    layouts = Layouts(SimulatedIndex(sizes), sizes.spec, sizes.dtype, sizes.quantisation, device.storage)
    return Simulated(assemble(config, sizes.spec, layouts, None, device, budget), device, budget.placement)


def _refuse_disk(hardware: Hardware, config: EngineConfig, placement: Placement) -> None:
    uses = [name for name in ("kv_disk_tokens", "activation_disk_rows") if getattr(config, name)]
    if "disk" in placement.values():
        uses.append("weights that do not fit into memory")
    if uses:
        raise OutOfMemoryError(
            f"'{hardware.name}' has no disk for {', '.join(uses)}; raise the memory, or plan for less"
        )


def simulate(
    config: EngineConfig, sizes: Sizes, hardware: Hardware, job: Job, *, prefilled: bool = False
) -> Simulation:
    """Carry out ``job`` as ``config`` has it, by the engine's own scheduler and executor. If it is ``prefilled``, all
    positions of the prompts but the last have their KV already.

    Raises ConfigError and OutOfMemoryError as the engine would when it is loaded.
    """
    built = build_simulated(config, sizes, hardware)
    parts = built.parts
    try:
        model = CostModel(sizes, hardware, job)
        on_disk = parts.weights.embedding.on_disk
        with Shortcuts():
            return _run(built, job, model.lookups_s(1) if on_disk else 0.0, prefilled)
    finally:
        parts.close()


@dataclass(frozen=True, slots=True)
class _Source:
    """Hidden states out of nothing, in the time that looking tokens up takes."""

    width: int
    device: SimulatedDevice
    lookup_s: float
    """Of a token, if the tables are on disk."""

    def __call__(self, batch: Batch, tile: Tile) -> torch.Tensor:
        rows = tile.rows.stop - tile.rows.start
        self.device.clock.spend(rows * self.lookup_s, "disk read", "lookups")
        return torch.empty(rows, self.width, dtype=self.device.dtype, device=META)


def _run(built: Simulated, job: Job, lookup_s: float, prefilled: bool) -> Simulation:
    parts, device = built.parts, built.device
    config, spec, clock = parts.config, parts.spec, device.clock
    layers = range(spec.n_layers)
    scheduler = Scheduler(
        parts.homes, layers, config.max_sequences, config.prefill_rows, config.schedule, config.tile_rows
    )
    for number in range(job.n_sequences):
        scheduler.add(Sequence.silent(f"simulated-{number}", (0,) * job.prompt_len, spec.n_layers, job.gen_len))
    if prefilled:
        for sequence in scheduler.waiting:
            sequence.kv.set(layers, job.prompt_len - 1)
    source = _Source(spec.hidden_size, device, lookup_s)
    begun_s, loaded = clock.now_s, len(clock.timeline)
    prefill_s = decode_s = 0.0
    tokens = decode_tokens = sweeps = 0
    shown: tuple[tuple[bool, int], tuple[float, float]] = ((False, 0), (0.0, 0.0))
    while shares := scheduler.schedule():
        start_s = clock.now_s
        parts.executor.run(Sweep(sweeps, layers, shares, source, sink(parts)))
        device.sweep(len(shares))
        made = 0
        for share in shares:
            if share.logit_rows:
                share.sequence.append(_TOKEN)
                made += 1
                if len(share.sequence.output) == job.gen_len:
                    scheduler.remove(share.sequence)
        sweeps, tokens = sweeps + 1, tokens + made
        decodes = all(share.start >= job.prompt_len - prefilled for share in shares)
        if decodes:
            decode_s += clock.now_s - start_s
            decode_tokens += made
        else:
            prefill_s += clock.now_s - start_s
        if (decodes, len(shares)) >= shown[0]:
            shown = (decodes, len(shares)), (start_s - begun_s, clock.now_s - begun_s)
    if scheduler.waiting:
        raise ConfigError(
            f"{len(scheduler.waiting)} of {job.n_sequences} sequences of {job.context} positions find no room for "
            "their KV; raise kv_tokens, kv_host_tokens or kv_disk_tokens"
        )
    shown_s, timeline = shown[1], clock.timeline[loaded:]
    for busy in timeline:
        busy.start_s, busy.end_s = max(0.0, busy.start_s - begun_s), busy.end_s - begun_s
    return Simulation(prefill_s, decode_s, decode_tokens, tokens, sweeps, tuple(timeline), built.memory, shown_s)
