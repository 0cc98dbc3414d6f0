"""Putting an engine's parts together inside memory budgets, everything counted before anything is loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .batch import BatchBuilder
from .block import DecoderBlock
from .budget import SLOTS, divide
from .checkpoint.index import Checkpoint
from .checkpoint.store import resolve
from .config import EngineConfig
from .device import Device, open_device
from .executor import Executor
from .kv_homes import KVHome
from .opening import open_activations, open_homes
from .quant.format import Quantisation
from .rope import Rope
from .sampling import Sampler
from .sizes import Sizes
from .spec import ModelSpec
from .sweep import EmbedTokens, ExitHead
from .text.tokenizer import Tokenizer
from .tiers import Tiers
from .weight_store import WeightStore


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine runs on."""

    config: EngineConfig
    spec: ModelSpec
    tokenizer: Tokenizer
    device: Device
    tiers: Tiers
    weights: WeightStore
    homes: Sequence[KVHome]
    executor: Executor
    sampler: Sampler
    context: int
    """Longest sequence admitted."""

    def source(self) -> EmbedTokens:
        return EmbedTokens(self.weights.embedding)

    def sink(self) -> ExitHead:
        return ExitHead(self.spec, self.device, self.weights)

    def close(self) -> None:
        """Stop the threads that read ahead, and give files back."""
        self.weights.close()
        self.executor.activations.close()
        for home in self.homes:
            home.close()


def build(config: EngineConfig, progress: Callable[[int], None] | None = None) -> Parts:
    """Load a model. ``progress`` is told of the weight bytes read.

    Raises a HeliosError: ConfigError, ModelNotFoundError, CheckpointError, UnsupportedModelError, OutOfMemoryError.
    """
    config.validate()
    directory = resolve(config.model)
    spec = ModelSpec.from_directory(directory)
    checkpoint = Checkpoint(directory)
    tokenizer = Tokenizer.load(directory)
    spec = replace(spec, eos_ids=tokenizer.eos_ids(spec))
    device = open_device(config)
    sizes = Sizes(spec, device.dtype, Quantisation.of(directory))
    budget = divide(config, sizes, device)
    tiers = budget.tiers
    tiers["device"].hold(budget.work_bytes, "activations")
    homes = open_homes(config, spec, device, budget)  # before the weights: what the disk lacks is found at once
    activations = open_activations(config, spec, device, budget)
    try:
        weights = WeightStore(
            checkpoint,
            spec,
            device,
            tiers,
            budget.placement,
            n_slots=SLOTS,
            expansion_bytes=sizes.expansion,
            read_ahead=config.read_ahead,
            progress=progress,
        )
    except BaseException:
        activations.close()
        for home in homes:
            home.close()
        raise
    rope = Rope(spec.rope, spec.head_dim, spec.max_positions, device.torch_device) if spec.rope else None
    batches = BatchBuilder(spec, homes, rope, device, tile_rows=config.tile_rows, value_share=config.value_share)
    executor = Executor(DecoderBlock(spec, device), weights, batches, activations)
    return Parts(config, spec, tokenizer, device, tiers, weights, homes, executor, budget.sampler, budget.context)
