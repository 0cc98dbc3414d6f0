"""Putting an engine's parts together inside memory budgets, everything counted before anything is loaded."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from .batch import BatchBuilder
from .block import DecoderBlock
from .boundary import BoundaryStates
from .budget import Budget, divide
from .checkpoint.index import Checkpoint
from .checkpoint.store import resolve
from .config import EngineConfig
from .device import Device, open_device
from .errors import ConfigError
from .executor import Executor
from .exits.cut import cut, heads_of
from .exits.heads import Heads
from .exits.profile import ExitProfile
from .exits.scored import ScoredHead, load_heads
from .kv_homes import KVHome
from .opening import open_activations, open_homes
from .passes.base import Pass
from .passes.plain import PlainPass
from .passes.trunk import Trunk
from .quant.format import Quantisation
from .quant.stored import check_model
from .rope import Rope
from .sampling import Sampler
from .sizes import Sizes
from .spec import Exit, ModelSpec
from .storage.storage import Storage
from .sweep import EmbedTokens, ExitHead
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
    end: Exit | None = None
    """The exit that the model is cut at; None if it is whole."""
    exit_heads: Mapping[int, HeadWeights] = field(default_factory=dict)
    """Of the exits that are scored beside the whole model."""
    kept: Mapping[int, BoundaryStates] = field(default_factory=dict)
    """Stores for the states that leave so many layers."""
    exit_profile: ExitProfile | None = None
    """What they would have said; None if none is scored."""

    def source(self) -> EmbedTokens:
        return EmbedTokens(self.weights.embedding)

    def sink(self) -> ExitHead:
        if self.exit_profile is None:
            return ExitHead(self.spec, self.device, self.weights)
        return ScoredHead(self.spec, self.device, self.weights, self.exit_heads, self.exit_profile)

    def passing(self) -> Pass:
        """How tokens pass the model."""
        depth, threshold = (self.end.layer, self.end.threshold) if self.end else (self.spec.n_layers, None)
        layers = range(self.spec.n_layers)
        return PlainPass(
            self.executor, layers, self.source(), self.sink(), self.sampler, depth=depth, threshold=threshold or 0.0
        )

    def trunk(self) -> Trunk:
        """The layers in segments that end where states are kept."""
        config = self.config
        rows = config.prefill_rows + config.max_sequences
        return Trunk(self.executor, self.source(), self.kept, self.spec.n_layers, rows, config.tile_rows)

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
    scored = _scored(config, heads, spec)
    index, spec, end = cut(config, checkpoint, heads, replace(spec, exits=heads.exits), quantisation)
    device = open_device(config)
    device.storage = storage or device.storage
    budget = divide(config, Sizes(spec, device.dtype, quantisation, scored), device)
    layouts = Layouts(index, spec, device.dtype, quantisation, device.storage)
    parts = assemble(config, spec, layouts, tokenizer, device, budget, progress)
    if not scored:
        return replace(parts, end=end)
    try:
        loaded = load_heads(heads, spec, checkpoint, parts.weights.before_head, device, parts.tiers["device"])
    except BaseException:
        parts.close()
        raise
    return replace(parts, exit_heads=loaded, exit_profile=ExitProfile([end.layer for end in scored]))


def _scored(config: EngineConfig, heads: Heads, spec: ModelSpec) -> tuple[Exit, ...]:
    """The exits to score beside the whole model. Raises ConfigError where there is none, or the model is cut."""
    if not config.score_exits:
        return ()
    if not heads.exits:
        raise ConfigError("score_exits is set and this model has no exits; make heads with `helios tune-exits`")
    if config.depth not in (None, spec.n_layers):
        raise ConfigError(
            f"score_exits is set and depth is {config.depth}; exits are scored at full depth: leave it out"
        )
    return heads.exits


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
    homes = open_homes(config, spec, device, budget, opened)  # before the weights: what the disk lacks shows at once
    activations = open_activations(config, spec, device, budget, opened)
    weights = WeightStore(
        layouts,
        spec,
        device,
        tiers,
        budget.placement,
        n_slots=budget.weight_slots,
        expansion_bytes=budget.expansion_bytes,
        read_ahead=config.read_ahead,
        progress=progress,
    )
    opened.callback(weights.close)
    rope = Rope(spec.rope, spec.head_dim, spec.max_positions, device.torch_device) if spec.rope else None
    batches = BatchBuilder(spec, homes, rope, device, tile_rows=config.tile_rows, value_share=config.value_share)
    executor = Executor(DecoderBlock(spec, device), weights, batches, activations)
    return Parts(
        config, spec, tokenizer, device, tiers, weights, homes, executor, budget.sampler, budget.context, opened
    )
