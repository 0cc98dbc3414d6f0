"""Options one by one, and for each the placement that the cost model finds best: candidates for a plan."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from ..budget import SLOTS, Terms
from ..config import TILE_ROWS, EngineConfig, TierName
from ..kv import BLOCK, blocks_for
from .costs import CostModel, Option, kv_blocks_of
from .places import compact
from .placing import KINDS, Counts, Placer, Room, Shape, named_units
from .simulator.device import SimulatedDevice
from .task import Task

BLOCKS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Sizes of blocks that are tried."""
PREFILL_ROWS = (512, 4096, 131072)
"""Prompt rows of a sweep that are tried: more of them read the weights less often and take more memory."""
COARSE = 3
"""At first one block size of so many is tried, then those around the best."""
PROMISING = 2
"""Block sizes whose neighbourhood is searched."""
ALIKE = 2
"""Of candidates of one kind, those that may have the same block size while there are others."""
ACTIVATION_SHARE = 0.15
"""Of the device's memory, what hidden states may take before they go to another tier."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration, and what the cost model says of it."""

    option: Option
    config: EngineConfig
    counts: Counts

    @property
    def second_per_sequence(self) -> float:
        return self.counts.total_s / self.option.block


class Candidates:
    """Those of one task, solved for as they are asked for."""

    def __init__(self, task: Task, solved: Callable[[int], None]) -> None:
        """``solved`` is told of the number of options done."""
        self.task = task
        self.model = CostModel(task.sizes, task.hardware, task.job)
        self.blocks = [n for n in BLOCKS if n < task.job.n_sequences] + [min(task.job.n_sequences, BLOCKS[-1])]
        self._placer = Placer()
        self._of: dict[Option, Candidate | None] = {}
        self._solved = solved

    def __len__(self) -> int:
        return len(self._of)

    def of(self, option: Option) -> Candidate | None:
        """The best placement under an option; None if nothing fits."""
        if option not in self._of:
            self._of[option] = _candidate(self.task, self.model, self._placer, option)
            self._solved(len(self._of))
        return self._of[option]

    def promising(self) -> list[Candidate]:
        """From blocks far apart to all ways of running blocks of about the best sizes, the fastest first."""
        found = self._solve(_coarse(self.task, self.blocks))
        best = [candidate.option.block for candidate in found[:PROMISING]] or self.blocks[:PROMISING]
        found = self._solve(_fine(self.task, self.blocks, best))
        return self._solve(_staggered(self.task, found[:PROMISING]))

    def neighbours(self, option: Option) -> Iterator[Candidate]:
        """Those with the next smaller or larger block, with one half way there, and with other prompt rows."""
        sizes = sorted({*self.blocks, option.block})
        at = sizes.index(option.block)
        near = [sizes[i] for i in (at + 1, at - 1) if 0 <= i < len(sizes)]
        near += [(size + option.block) // 2 for size in near]
        others = [(block, option.prefill_rows) for block in near]
        others += [(option.block, rows) for rows in PREFILL_ROWS]
        for block, rows in others:
            whole = option.prefill_rows == option.block * self.task.job.prompt_len
            made = _option(self.task, block, PREFILL_ROWS[-1] if whole else rows, option.delegate, option.kv_int4)
            candidate = self.of(replace(made, schedule=option.schedule))
            if candidate and made.block >= 1:
                yield candidate

    def _solve(self, options: Iterable[Option]) -> list[Candidate]:
        for option in options:
            self.of(option)
        return sorted((one for one in self._of.values() if one), key=lambda one: one.second_per_sequence)


def in_turn(found: Sequence[Candidate]) -> Iterator[Candidate]:
    """The candidates by kind in turn, since between kinds the cost model errs most; of each kind the best first, but
    for each block size two before any third."""
    kinds: dict[object, list[Candidate]] = {}
    for candidate in found:
        option = candidate.option
        kinds.setdefault((option.delegate, option.kv_int4, option.schedule), []).append(candidate)
    for turn in zip_longest(*(_mixed(alike) for alike in kinds.values())):
        yield from (candidate for candidate in turn if candidate)


def _mixed(found: Sequence[Candidate]) -> list[Candidate]:
    """In order, but of each block size no more than ALIKE before all others."""
    seen: Counter[int] = Counter()
    first: list[Candidate] = []
    later: list[Candidate] = []
    for candidate in found:
        seen[candidate.option.block] += 1
        (first if seen[candidate.option.block] <= ALIKE else later).append(candidate)
    return first + later


def _coarse(task: Task, blocks: Sequence[int]) -> Iterator[Option]:
    """Blocks far apart, each with as many prompt rows in a sweep as may be."""
    for block in {*blocks[::COARSE], blocks[-1]}:
        for delegate, kv_int4 in _ways(task):
            yield _option(task, block, PREFILL_ROWS[-1], delegate, kv_int4)


def _ways(task: Task) -> list[tuple[bool, bool]]:
    """Whether to attend to KV on the host there, and whether to keep KV in 4 bits."""
    return [(d, q) for d in ((True, False) if task.hardware.separate else (True,)) for q in {False, task.kv_int4}]


def _fine(task: Task, blocks: Sequence[int], best: Sequence[int]) -> Iterator[Option]:
    """Blocks of about the best sizes, in every way but one after another."""
    near = {at + step for block in best for at in [blocks.index(block)] for step in range(1 - COARSE, COARSE)}
    for at in sorted(near & set(range(len(blocks)))):
        for prefill_rows in PREFILL_ROWS:
            for delegate, kv_int4 in _ways(task):
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
    if task.hardware.separate:
        return "host"
    return "disk" if task.hardware.disk_read else "device"


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


def _candidate(task: Task, model: CostModel, placer: Placer, option: Option) -> Candidate | None:
    """The best placement under an option, if there is one."""
    config, spec = _config(task, option), task.stage
    device = SimulatedDevice.of(task.hardware, task.dtype)
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
        disk=bool(task.hardware.disk_read),
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
    counts = placer.place(shape, model.costs(option), room, option.read_ahead, task.latency_limit_s)
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
