"""Putting an engine's parts together inside a memory budget: weights first, then workspace, then KV cache."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from .attention import AttentionPlanner
from .batch import BatchBuilder
from .block import DecoderBlock
from .checkpoint.index import Checkpoint
from .checkpoint.store import resolve
from .config import EngineConfig, format_bytes
from .device import Device, open_device, query_rows
from .errors import ConfigError, OutOfMemoryError
from .executor import Executor
from .kv import BLOCK, KVCache, block_bytes, blocks_for, scratch_bytes
from .rope import Rope
from .sampling import Sampler
from .spec import ModelSpec
from .sweep import EmbedTokens, ExitHead
from .text.tokenizer import Tokenizer
from .tiers import Tier
from .weights import ModelWeights, load_resident, weight_bytes

HEADROOM = 0.9
"""Share of the memory that is free which an engine takes when no limit is given."""
TYPICAL_LENGTH = 1024
"""Positions a sequence is expected to reach, when nothing says how large the KV cache should be."""
SCRATCH_BLOCKS = 256
"""Blocks one attention group gathers at most, unless a single sequence is longer."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine runs on."""

    config: EngineConfig
    spec: ModelSpec
    tokenizer: Tokenizer
    device: Device
    tier: Tier
    weights: ModelWeights
    kv: KVCache
    executor: Executor
    sampler: Sampler
    context: int
    """Longest sequence admitted."""

    def source(self) -> EmbedTokens:
        return EmbedTokens(self.spec, self.weights.embedding)

    def sink(self) -> ExitHead:
        return ExitHead(self.spec, self.device, self.weights.head)


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
    context = _context(config, spec)
    device = open_device(config)
    capacity = config.memory_bytes or int(device.available_bytes() * HEADROOM)
    _refuse_beyond_machine(capacity, device)
    tier = Tier("device", device.torch_device, capacity)
    sampler = Sampler(spec.vocab_size, device.torch_device)
    work = activation_bytes(spec, config, device, context) + sampler.workspace_bytes
    n_blocks, scratch_blocks = _layout(config, spec, context, device, capacity, work)
    tier.hold(work, "activations")
    weights = load_resident(checkpoint, spec, device, tier, progress)
    kv = KVCache(spec, spec.n_layers, n_blocks, scratch_blocks, device.dtype, tier)
    rope = Rope(spec.rope, spec.head_dim, spec.max_positions, device.torch_device) if spec.rope else None
    batches = BatchBuilder(spec, AttentionPlanner(kv, device), rope, device)
    executor = Executor(DecoderBlock(spec, device, kv), weights.layers, batches)
    return Parts(config, spec, tokenizer, device, tier, weights, kv, executor, sampler, context)


def _context(config: EngineConfig, spec: ModelSpec) -> int:
    context = config.context or spec.max_positions
    if context > spec.max_positions:
        raise ConfigError(f"context is {context}; this model was made for at most {spec.max_positions} positions")
    return min(context, config.kv_tokens or context)


def _refuse_beyond_machine(capacity: int, device: Device) -> None:
    available = device.available_bytes()
    if capacity > available:
        raise OutOfMemoryError(
            f"the memory limit is {format_bytes(capacity)} and only {format_bytes(available)} are free on "
            f"'{device.torch_device}'; lower the limit or free memory"
        )


def _layout(
    config: EngineConfig, spec: ModelSpec, context: int, device: Device, capacity: int, work: int
) -> tuple[int, int]:
    """Blocks of the KV cache and of the scratch buffer, beside ``work`` bytes of activations.

    Raises OutOfMemoryError with every term if they do not fit.
    """
    weights = weight_bytes(spec, device.dtype, range(spec.n_layers))
    per_block = block_bytes(spec, device.dtype, spec.n_layers)
    scratch_blocks = max(blocks_for(context), SCRATCH_BLOCKS)
    scratch = scratch_bytes(spec, device.dtype, scratch_blocks)
    asked = config.kv_tokens or max(config.max_sequences * TYPICAL_LENGTH, context)
    room = (capacity - weights - scratch - work) // per_block
    least = blocks_for(config.kv_tokens or context)
    if room < least:
        raise OutOfMemoryError(
            f"the memory limit is {format_bytes(capacity)}; this model takes {format_bytes(weights)} for weights in "
            f"{str(device.dtype).removeprefix('torch.')}, {format_bytes(scratch + work)} for workspaces and "
            f"{format_bytes(least * per_block)} for the KV cache of {least * BLOCK} positions. Raise the limit, "
            f"lower context or kv_tokens, or choose a smaller model or dtype"
        )
    return min(room, blocks_for(asked)), scratch_blocks


def activation_bytes(spec: ModelSpec, config: EngineConfig, device: Device, context: int) -> int:
    """Upper bound of what a sweep's hidden states, scores and logits take, beside weights, KV and the workspaces."""
    rows = config.prefill_rows + config.max_sequences
    width = 4 * spec.hidden_size + 2 * (spec.q_size + 2 * spec.kv_size) + 3 * spec.mlp_size
    scores = 2 * query_rows(spec.n_heads, context) * spec.n_heads * context
    return (rows * width + scores + config.max_sequences * spec.vocab_size) * device.dtype.itemsize
