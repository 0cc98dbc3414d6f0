"""Changing how many layers of a model serve, while it serves.

Expanding has two phases. Memory is made free, then what is lacking is read in the background, while the layers that
there are go on serving. Between two sweeps the deeper model then takes over: sequences catch up from kept states, or
are prefilled again. If reading fails, everything is as before. Shrinking and parking only give things back.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from .boundary import Behind, BoundaryStates
from .budget import Budget, Given, divide
from .build import Parts, executor
from .config import TierName, format_bytes
from .errors import ConfigError, OutOfMemoryError
from .exits.modes import MODES, kept_at
from .held import Common, Weights, load_weights
from .kv_homes import KVHome, ResidentKV
from .opening import open_kept, weight_slots
from .placement import Placement
from .scheduler import Scheduler
from .sizes import Sizes
from .units import Layouts, units


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What the model of the new depth has that the old one does not."""

    weights: Weights
    slots: Any
    layers: list[list[Any]]
    """Of each home of KV."""
    kept: dict[int, BoundaryStates]


class Transition:
    """From the depth that is served to another. ``load`` may run on another thread, all else is the engine's."""

    def __init__(self, parts: Parts, depth: int | None) -> None:
        """Sees that it can be done, and changes nothing. ``depth`` None is the whole model.

        Raises ConfigError for a depth that is none and for engines whose depth is fixed, OutOfMemoryError with what
        there would have to be room for.
        """
        asked = [name for name in MODES if getattr(parts.config, name)]
        if asked:
            raise ConfigError(f"the depth cannot be changed with {asked[0]}, which needs the whole model: leave it out")
        assert parts.model is not None, "engines serve models"
        tensors, self.spec, self.end = parts.model.at(depth)
        self.depth = self.end.layer if self.end else self.spec.n_layers
        self._parts = parts
        self._shared = min(self.depth, parts.depth)
        """Layers that both depths have."""
        self._quantisation = parts.model.quantisation
        self._layouts = Layouts(tensors, self.spec, parts.device.dtype, self._quantisation, parts.device.storage)
        self._before = [home.pool.n_blocks for home in parts.homes]
        self._states = self._usable_states()
        extra = kept_at(parts.config, self.end.layer if self.end else None)
        self._sizes = Sizes(self.spec, parts.device.dtype, self._quantisation, extra)
        self._budget = self._divided()
        on_device = self._budget.kv_blocks["device"]
        self._targets = [on_device if home.tier == "device" else home.pool.n_blocks for home in parts.homes]
        """Blocks that each home is to have."""
        self._blocks_meanwhile = self._fit()
        self._loaded: _Loaded | None = None

    @property
    def _common(self) -> Common | None:
        """What is there already."""
        parts = self._parts
        return Common(parts.weights.weights, parts.budget.placement, self._shared) if parts.depth else None

    def make_room(self, scheduler: Scheduler) -> None:
        """Make the KV pool as small as the new depth needs it, the youngest sequences waiting if they must."""
        for home in self._parts.homes:
            if home.tier == "device" and self._blocks_meanwhile < home.pool.n_blocks:
                scheduler.make_room(home, self._blocks_meanwhile)
                resize(home, self._blocks_meanwhile, scheduler)

    def load(self, progress: Callable[[int], None] | None = None) -> None:
        """Read what is lacking into memory of its own. Raises CheckpointError, OutOfMemoryError, HeliosError, and holds
        nothing then."""
        parts, tiers = self._parts, self._parts.tiers
        common = self._common
        with ExitStack() as undo:
            undo.callback(self._layouts.close)
            weights = load_weights(
                self._layouts, self.spec, parts.device, tiers, self._budget.placement, common, progress
            )
            undo.callback(weights.release, tiers, common.weights if common else None)
            slots = weight_slots(weights, parts.device, self._budget, parts.weights.slots)
            if slots is not parts.weights.slots:
                undo.callback(parts.weights.give, slots)
            layers = []
            for home in parts.homes:
                layers.append(home.more(self.spec.n_layers - self._shared))
                undo.callback(home.give_up, layers[-1])
            kept = open_kept(self.spec, parts.device, self._budget)
            for states in kept.values():
                undo.callback(states.release, tiers["device"])
            self._loaded = _Loaded(weights, slots, layers, kept)
            self._undo = undo.pop_all()

    def commit(self, parts: Parts, scheduler: Scheduler) -> Parts:
        """Between two sweeps: the new depth serves. ``parts`` are those that did up to now; returns those that do."""
        assert self._loaded is not None, "loaded before"
        self._parts, loaded = parts, self._loaded
        self._undo.pop_all()  # what was loaded stays
        parts.weights.exchange(loaded.weights, self._layouts, loaded.slots)
        for home, layers in zip(parts.homes, loaded.layers, strict=True):
            home.exchange(self._shared, layers)
        behind = self._catch_up(scheduler)
        for home, blocks in zip(parts.homes, self._targets, strict=True):
            if blocks > home.pool.n_blocks:
                resize(home, blocks, scheduler)
        run = executor(
            parts.config,
            self.spec,
            parts.homes,
            parts.rope,
            parts.device,
            parts.weights,
            parts.executor.activations,
        )
        parts.device.trim()
        return replace(
            parts,
            spec=self.spec,
            end=self.end,
            depth=self.depth,
            executor=run,
            kept=loaded.kept,
            behind=behind,
            budget=self._budget,
        )

    def roll_back(self, scheduler: Scheduler) -> None:
        """Give back what was loaded and have the KV pool as it was, as far as there is room."""
        if self._loaded is not None:
            self._undo.close()
        self._layouts.close()
        for home, blocks in zip(self._parts.homes, self._before, strict=True):
            if blocks > home.pool.n_blocks:
                resize(home, blocks, scheduler)

    def _usable_states(self) -> BoundaryStates | None:
        """The states that a deeper model goes on from."""
        parts = self._parts
        return parts.kept.get(parts.depth) if parts.depth < self.depth else None

    def _catch_up(self, scheduler: Scheduler) -> Behind | None:
        """Let every sequence lack the layers that it has not passed."""
        parts, states = self._parts, self._states
        below, above = range(self._shared), range(self._shared, parts.whole)
        for sequence in scheduler.running:
            lags = parts.behind is not None and parts.behind.lags(sequence)
            sequence.kv.set(above, 0)
            if lags or (states is not None and states.filled(sequence) < sequence.kv.of(below)):
                sequence.kv.cut(0)
        unused = [kept for kept in parts.kept.values() if kept is not states]
        for kept in (*unused, *([parts.behind.states] if parts.behind else ())):
            kept.release(parts.tiers["device"])
        return Behind(states, range(self._shared, self.spec.n_layers)) if states else None

    def _divided(self) -> Budget:
        parts = self._parts
        reserved = self._states.n_bytes if self._states else 0
        refusal: OutOfMemoryError | None = None
        for placement in self._placements():
            try:
                return divide(parts.config, self._sizes, parts.device, Given(parts.tiers, placement, reserved))
            except OutOfMemoryError as error:
                refusal = error
        raise OutOfMemoryError(f"{self.depth} layers have no room beside what is served: {refusal}")

    def _fit(self) -> int:
        """KV blocks that there may be on the device while both depths' weights are. Raises OutOfMemoryError if not even
        without any there is room."""
        parts, free, lacks = self._parts, self._parts.tiers["device"].free_bytes, self._lacking()
        home = next((home for home in parts.homes if home.tier == "device"), None)
        held = home.pool.n_blocks * parts.kv_layers if home else 0
        block = self._budget.kv_format.block_bytes
        if lacks > free + held * block:
            raise OutOfMemoryError(
                f"{self.depth} layers have no room beside what is served: until that is given back they take "
                f"{format_bytes(lacks)} more, and {format_bytes(free + held * block)} can be made free. Raise "
                "memory_bytes (memory in a configuration)"
            )
        if home is None:
            return 0
        layers = parts.kv_layers + self.spec.n_layers - self._shared
        most = (free - lacks) // block + held
        return min(home.pool.n_blocks, self._budget.kv_blocks["device"], most // layers)

    def _lacking(self) -> int:
        """Upper bound of the bytes that are loaded before anything is given back, but for KV."""
        sizes, placement, common = self._sizes, self._budget.placement, self._common
        total = sizes.kept_block * sum(self._budget.kv_blocks.values())
        for unit in units(self.spec.n_layers):
            if placement[unit] == "device" and not (common and common.holds(unit, placement)):
                total += sizes.matrices(unit)
            if unit.kind == "head" or (unit.kind != "embedding" and unit.number >= self._shared):
                total += sizes.small(unit)
        streams = any(tier != "device" for unit, tier in placement.items() if unit.kind != "embedding")
        slots = self._budget.weight_slots if streams and not self._parts.weights.slots else 1
        return total + slots * sizes.slot

    def _placements(self) -> Iterator[Placement]:
        """What is placed stays, and what the engine began with goes back to its place; further units are where the
        model computes if all have room there, else on disk."""
        known = {**self._parts.first, **self._parts.budget.placement}
        tiers: tuple[TierName, ...] = ("device", "disk")
        for tier in tiers:
            yield {unit: known.get(unit, tier) for unit in units(self.spec.n_layers)}


def park(parts: Parts, scheduler: Scheduler) -> Parts:
    """Give weights, KV and kept states back. Sequences wait, to be prefilled again."""
    for home in parts.homes:
        scheduler.make_room(home, 0)
        home.exchange(0, [])
    for states in (*parts.kept.values(), *([parts.behind.states] if parts.behind else ())):
        states.release(parts.tiers["device"])
    parts.weights.drop()
    parts.device.trim()
    return replace(parts, depth=0, kept={}, behind=None)


def resize(home: KVHome, blocks: int, scheduler: Scheduler) -> None:
    """Have so many blocks, or as many as there is room for. Sequences wait where there is none for a copy."""
    assert isinstance(home, ResidentKV), "others keep their size"
    blocks = min(blocks, home.largest()) if blocks > home.pool.n_blocks else blocks
    try:
        moved = home.resize(blocks)
    except OutOfMemoryError:
        scheduler.make_room(home, 0)
        moved = home.resize(blocks)
    scheduler.renumber(home, moved)
