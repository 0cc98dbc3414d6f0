"""Putting an engine's parts together inside memory budgets, everything counted before anything is loaded."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from torch import Tensor

from .activations import Activations
from .batch import BatchBuilder
from .block import DecoderBlock
from .boundary import Behind, BoundaryStates
from .budget import Budget, divide
from .checkpoint.index import Checkpoint
from .checkpoint.store import resolve
from .config import EngineConfig
from .device import Device, open_device
from .executor import Executor
from .exits.cut import Model, heads_of
from .exits.modes import beside
from .exits.profile import ExitProfile
from .exits.scored import load_heads, load_rows
from .kv_homes import KVHome
from .opening import open_activations, open_homes, open_kept, open_weights
from .placement import Placement
from .quant.format import Quantisation
from .quant.stored import check_model
from .rope import Rope
from .sampling import Sampler
from .sizes import Sizes
from .spec import Exit, ModelSpec
from .storage.storage import Storage
from .text.tokenizer import Tokenizer
from .tiers import Tiers
from .units import Layouts
from .weight_store import WeightStore
from .weights import HeadWeights


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine runs on."""

    config: EngineConfig
    spec: ModelSpec
    tokenizer: Tokenizer | None
    """None in a simulation, where nothing is said."""
    device: Device
    tiers: Tiers
    weights: WeightStore
    homes: Sequence[KVHome]
    executor: Executor
    sampler: Sampler
    context: int
    """Longest sequence admitted."""
    opened: ExitStack
    """What must be closed."""
    budget: Budget
    depth: int
    """Layers of the trunk that tokens pass; 0 while the model is parked."""
    first: Placement
    """Where the engine had its weights at first."""
    rope: Rope | None = None
    model: Model | None = None
    """What other depths are cut from; None in a simulation."""
    end: Exit | None = None
    """The exit that the model is cut at; None if it is whole."""
    exit_heads: Mapping[int, HeadWeights] = field(default_factory=dict)
    """Of the exits beside the whole model."""
    frequent: Tensor | None = None
    """Rows [K, H] of the LM head, for the exits' checks."""
    kept: Mapping[int, BoundaryStates] = field(default_factory=dict)
    """Stores for the states that leave so many layers."""
    behind: Behind | None = None
    """Layers that sequences of before a change of depth are to catch up with."""
    exit_profile: ExitProfile | None = None
    """What they would have said; None if none is scored."""

    @property
    def kv_layers(self) -> int:
        """Layers that have KV."""
        return self.spec.n_layers if self.depth else 0

    @property
    def whole(self) -> int:
        """Layers of the whole model."""
        return self.model.spec.n_layers if self.model else self.spec.n_layers

    def close(self) -> None:
        """Stop the threads that read ahead, and give files back."""
        self.opened.close()


def build(config: EngineConfig, progress: Callable[[int], None] | None = None, storage: Storage | None = None) -> Parts:
    """Load a model. ``progress`` is told of the weight bytes read; ``storage`` opens files, if not the device's own.

    Raises a HeliosError: ConfigError, ModelNotFoundError, CheckpointError, UnsupportedModelError, OutOfMemoryError.
    """
    config.validate()
    directory = resolve(config.model)
    spec = ModelSpec.from_directory(directory)
    checkpoint = Checkpoint(directory)
    tokenizer = Tokenizer.load(directory)
    spec = replace(spec, eos_ids=tokenizer.eos_ids(spec))
    quantisation = Quantisation.of(directory)
    if config.plan is not None:
        from .planner.applied import planned  # which builds simulated engines, by this module

        config = planned(config, spec, quantisation)
    check_model(checkpoint, spec)
    heads = heads_of(config, directory, checkpoint, spec)
    extra = beside(config, heads, spec, quantisation)
    model = Model(checkpoint, replace(spec, exits=heads.exits), heads, quantisation)
    tensors, spec, end = model.at(config.depth)
    device = open_device(config)
    device.storage = storage or device.storage
    budget = divide(config, Sizes(spec, device.dtype, quantisation, extra), device)
    layouts = Layouts(tensors, spec, device.dtype, quantisation, device.storage)
    parts = replace(assemble(config, spec, layouts, tokenizer, device, budget, progress), model=model, end=end)
    if end is not None:
        parts = replace(parts, depth=end.layer)
    if not extra.heads:
        return parts
    try:
        tier = parts.tiers["device"]
        loaded = load_heads(extra.heads, heads, spec, checkpoint, parts.weights.before_head, device, tier)
        frequent = heads.frequent[: extra.frequent]
        return replace(
            parts,
            exit_heads=loaded,
            frequent=load_rows(checkpoint, spec, frequent, device, tier) if frequent else None,
            exit_profile=ExitProfile([found.layer for found in extra.heads]) if config.score_exits else None,
        )
    except BaseException:
        parts.close()
        raise


def assemble(
    config: EngineConfig,
    spec: ModelSpec,
    layouts: Layouts,
    tokenizer: Tokenizer | None,
    device: Device,
    budget: Budget,
    progress: Callable[[int], None] | None = None,
) -> Parts:
    """The parts on ``device``, as ``budget`` divides its memories; what was opened is closed again if something fails.

    Raises CheckpointError, OutOfMemoryError, HeliosError.
    """
    with ExitStack() as opened:
        parts = _open(config, spec, layouts, tokenizer, device, budget, progress, opened)
        return replace(parts, opened=opened.pop_all())


def _open(
    config: EngineConfig,
    spec: ModelSpec,
    layouts: Layouts,
    tokenizer: Tokenizer | None,
    device: Device,
    budget: Budget,
    progress: Callable[[int], None] | None,
    opened: ExitStack,
) -> Parts:
    tiers = budget.tiers
    opened.callback(layouts.close)
    tiers["device"].hold(budget.work_bytes, "activations")
    tiers["device"].hold(budget.library_bytes, "libraries")
    kept = open_kept(spec, device, budget)
    homes = open_homes(config, spec, device, budget, opened)  # before the weights: what the disk lacks shows at once
    activations = open_activations(config, spec, device, budget, opened)
    weights = open_weights(layouts, spec, device, budget, opened, read_ahead=config.read_ahead, progress=progress)
    rope = Rope(spec.rope, spec.head_dim, spec.max_positions, device.torch_device) if spec.rope else None
    return Parts(
        config=config,
        spec=spec,
        tokenizer=tokenizer,
        device=device,
        tiers=tiers,
        weights=weights,
        homes=homes,
        executor=executor(config, spec, homes, rope, device, weights, activations),
        sampler=budget.sampler,
        context=budget.context,
        opened=opened,
        kept=kept,
        budget=budget,
        depth=spec.n_layers,
        first=budget.placement,
        rope=rope,
    )


def executor(
    config: EngineConfig,
    spec: ModelSpec,
    homes: Sequence[KVHome],
    rope: Rope | None,
    device: Device,
    weights: WeightStore,
    activations: Activations,
) -> Executor:
    """What takes sweeps through a model's layers."""
    batches = BatchBuilder(spec, homes, rope, device, tile_rows=config.tile_rows, value_share=config.value_share)
    return Executor(DecoderBlock(spec, device), weights, batches, activations)
