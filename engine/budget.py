"""Dividing the memory budgets of one model, everything counted before anything is loaded.

What remains of the device after activations, workspaces, norms and slots goes to the KV cache and to weights.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from .checkpoint.store import home
from .config import EngineConfig, TierName, format_bytes
from .device import Device, query_rows
from .errors import ConfigError, OutOfMemoryError
from .kv import BLOCK, KVFormat, blocks_for
from .placement import Placement, fill, named
from .quant.ready import Expander
from .sampling import MAX_ROWS, Sampler
from .sizes import Sizes
from .spec import ModelSpec
from .tiers import Tier, Tiers

HEADROOM = 0.9
"""Share of the memory that is free which an engine takes when no limit is given."""
TYPICAL_LENGTH = 1024
"""Positions a sequence is expected to reach, when nothing says how large the KV cache should be."""
SCRATCH_BYTES = 2**25
"""What one attention group gathers at most, unless a single sequence is longer."""
SLOTS = 3
"""Buffers that KV and hidden states on their way pass through: one in use and two being filled keep the disk busy."""
WEIGHT_SLOTS_SHARE = 0.1
"""Of the memory, what SLOTS buffers for weights may take; else there are two, which do while reading is the slower."""
KV_SLOT_BYTES = 2**25
"""Size of a buffer that KV passes through, unless a single sequence needs more or the budget is small."""
SAMPLER_SHARE = 0.05
"""Of the memory, what sampling may take before it does fewer rows at a time."""
TOY_BYTES = 2**23
"""In less than this only toy models run, for which the libraries keep next to nothing."""
REMEDIES: dict[TierName, str] = {
    "device": "Raise memory_bytes (memory in a configuration), lower kv_tokens or max_sequences, or use a smaller "
    "model or dtype",
    "host": "Raise host_bytes (host_memory in a configuration), lower kv_host_tokens or activation_host_rows, or place "
    "fewer weights on the host",
    "disk": "Raise disk_bytes (disk_space in a configuration), lower kv_disk_tokens or activation_disk_rows, or choose "
    "another offload_dir",
}
BUFFER_SHARE = 0.05
"""Of the memory, what each kind of buffer may take before it is made smaller."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What each memory of a model is used for."""

    tiers: Tiers
    context: int
    """Longest sequence admitted."""
    placement: Placement
    kv_blocks: dict[TierName, int]
    scratch_blocks: int
    kv_slot_bytes: int
    kv_format: KVFormat
    expansion_bytes: int
    """Of the buffer that a quantised unit is expanded into."""
    sampler: Sampler
    weight_slots: int
    """Buffers that weights which are not resident pass through."""
    library_bytes: int
    work_bytes: int
    """Activations and the sampler's workspace."""
    activation_rows: tuple[int, int, int]
    """Rows whose hidden states are kept on device, host and disk."""
    kept: tuple[int, ...]
    """Where the states of all positions are kept: after so many layers."""
    activation_slot_bytes: int
    """Of a buffer that hidden states pass through; 0 if all stay on the device."""
    offload_dir: Path


@dataclass(frozen=True, slots=True)
class Given:
    """What an engine that changes its depth has already."""

    tiers: Tiers
    placement: Placement
    reserved: int = 0
    """Bytes on the device that are not to be divided."""


def divide(config: EngineConfig, sizes: Sizes, device: Device, given: "Given | None" = None) -> Budget:
    """Divide the budgets. Raises ConfigError, and OutOfMemoryError with every term if something does not fit."""
    spec = sizes.spec
    offload_dir = Path(config.offload_dir).expanduser() if config.offload_dir else home() / "offload"
    tiers = given.tiers if given else _tiers(config, device, offload_dir)
    capacity = tiers["device"].capacity_bytes - (given.reserved if given else 0)
    context = _context(config, spec)
    terms = Terms.of(config, sizes, device, capacity, context)
    fixed = terms.fixed_bytes
    least = 0 if terms.elsewhere >= blocks_for(context) else blocks_for(context)
    if config.kv_tokens is not None:
        least = blocks_for(config.kv_tokens)
    asked = blocks_for(_asked_tokens(config, context))
    if given or config.weights is not None:
        placement: Placement = given.placement if given else named(spec, config.weights or {})
        resident = sum(sizes.matrices(unit) for unit, t in placement.items() if t == "device")
        streams = any(tier != "device" for unit, tier in placement.items() if unit.kind != "embedding")
        room = capacity - fixed - resident - terms.slots_bytes(streams)
    elif capacity - fixed - terms.weights - terms.slots_bytes(False) >= least * terms.kv_block:
        placement, resident, streams = fill(sizes, terms.weights), terms.weights, False
        room = capacity - fixed - terms.weights - terms.slots_bytes(False)
    else:
        resident, streams = 0, True
        room = capacity - fixed - terms.slots_bytes(True)
        if config.kv_tokens is None:
            asked = max(least, min(asked, room // 2 // terms.kv_block))
        placement = fill(sizes, max(0, room - asked * terms.kv_block))
    blocks = min(asked, max(0, room) // terms.kv_block)
    if room < 0 or blocks < least:
        raise OutOfMemoryError(terms.refusal(capacity, resident, streams, least, device.dtype))
    kv_blocks: dict[TierName, int] = {"device": blocks}
    kv_blocks["host"] = blocks_for(config.kv_host_tokens)
    kv_blocks["disk"] = blocks_for(config.kv_disk_tokens)
    return Budget(
        tiers=tiers,
        context=context,
        placement=placement,
        kv_blocks=kv_blocks,
        scratch_blocks=terms.scratch_blocks,
        kv_slot_bytes=terms.kv_slot,
        kv_format=terms.kv_format,
        expansion_bytes=sizes.expansion,
        sampler=terms.sampler,
        weight_slots=terms.weight_slots,
        library_bytes=terms.libraries,
        work_bytes=terms.work,
        activation_rows=activation_rows(config),
        kept=sizes.beside.kept,
        activation_slot_bytes=terms.activation_slot,
        offload_dir=offload_dir,
    )


def _asked_tokens(config: EngineConfig, context: int) -> int:
    if config.kv_tokens is not None:
        return config.kv_tokens
    if config.kv_host_tokens or config.kv_disk_tokens:
        return 0
    return max(config.max_sequences * TYPICAL_LENGTH, context)


@dataclass(frozen=True, slots=True)
class Terms:
    """Bytes on the device, but for weights and KV that are to live there. The planner divides by the same ones."""

    work: int
    scratch: int
    libraries: int
    small: int
    """Norms and biases."""
    kept: int
    """States at exits of the positions whose KV is elsewhere."""
    kv_slots: int
    activation_slot: int
    weight_slot: int
    weight_slots: int
    weights: int
    """All matrices, if they were resident."""
    kv_block: int
    """One block over all layers, and its positions' states at exits."""
    elsewhere: int
    """KV blocks of the largest of the other tiers."""
    scratch_blocks: int
    kv_slot: int
    kv_format: KVFormat
    sampler: Sampler

    @classmethod
    def of(cls, config: EngineConfig, sizes: Sizes, device: Device, capacity: int, context: int) -> "Terms":
        spec = sizes.spec
        kv_format = KVFormat(spec, device.dtype, config.kv_dtype == "int4")
        layer_block = kv_format.block_bytes
        sampler = _sampler(config, spec, device, capacity)
        longest = blocks_for(context)
        expander = Expander.workspace_bytes() if sizes.quantisation else 0
        scratch_bytes = min(SCRATCH_BYTES, int(capacity * BUFFER_SHARE))
        scratch_blocks = max(longest, min(scratch_bytes // layer_block, longest * config.max_sequences))
        offloads = any(activation_rows(config)[1:])
        staged = bool(config.kv_disk_tokens) + bool(config.kv_host_tokens and not config.delegate)
        kv_slot_bytes = min(KV_SLOT_BYTES, int(capacity * BUFFER_SHARE))
        kv_slot = max(longest, min(kv_slot_bytes // layer_block, longest * config.max_sequences)) * layer_block
        return cls(
            work=activation_bytes(spec, config, device, context, sizes.beside.answers) + sampler.workspace_bytes,
            scratch=kv_format.gathered_bytes(scratch_blocks) + sizes.expansion + expander,
            libraries=min(device.library_bytes, max(0, capacity - TOY_BYTES) // 2),
            small=sizes.all_small,
            kept=sizes.kept_block * (blocks_for(config.kv_host_tokens) + blocks_for(config.kv_disk_tokens)),
            kv_slots=staged * SLOTS * kv_slot,
            activation_slot=config.tile_rows * spec.hidden_size * device.dtype.itemsize if offloads else 0,
            weight_slot=sizes.slot,
            weight_slots=SLOTS if SLOTS * sizes.slot <= capacity * WEIGHT_SLOTS_SHARE else 2,
            weights=sizes.all_matrices,
            kv_block=layer_block * spec.n_layers + sizes.kept_block,
            elsewhere=max(blocks_for(config.kv_host_tokens), blocks_for(config.kv_disk_tokens)),
            scratch_blocks=scratch_blocks,
            kv_slot=kv_slot,
            kv_format=kv_format,
            sampler=sampler,
        )

    @property
    def fixed_bytes(self) -> int:
        slots = self.kv_slots + SLOTS * self.activation_slot
        return self.work + self.scratch + self.libraries + self.small + self.kept + slots

    def slots_bytes(self, streams: bool) -> int:
        """Weights pass through one slot when they are loaded, and through several when they are in every sweep."""
        return (self.weight_slots if streams else 1) * self.weight_slot

    def refusal(self, capacity: int, resident: int, streams: bool, least: int, dtype: torch.dtype) -> str:
        return (
            f"the memory limit is {format_bytes(capacity)}; this model takes at least "
            f"{format_bytes(resident + self.small + self.slots_bytes(streams))} for "
            f"{str(dtype).removeprefix('torch.')} weights and the buffers they pass through "
            f"({format_bytes(self.weights)} if all stay in memory), "
            f"{format_bytes(self.fixed_bytes - self.small)} for workspaces and "
            f"{format_bytes(least * self.kv_block)} for the KV cache of {least * BLOCK} positions. Raise the limit, "
            f"lower context, kv_tokens, prefill_rows or max_sequences, move KV to disk (kv_disk_tokens), or choose "
            f"a smaller model or dtype"
        )


def _context(config: EngineConfig, spec: ModelSpec) -> int:
    context = config.context or spec.max_positions
    if context > spec.max_positions:
        raise ConfigError(
            f"context is {context}; this model was made for at most {spec.max_positions} positions. Lower it"
        )
    most = max(config.kv_tokens or 0, config.kv_host_tokens, config.kv_disk_tokens)
    return min(context, most or context)


def _tiers(config: EngineConfig, device: Device, offload_dir: Path) -> Tiers:
    """The memories a model may be spread over. Raises OutOfMemoryError for a limit that the machine does not have."""
    capacity = config.memory_bytes or int(device.available_bytes() * HEADROOM)
    _refuse_beyond_machine("memory", capacity, device.available_bytes(), str(device.torch_device))
    separate = device.host is not device
    available = device.host.available_bytes()
    host = config.host_bytes or (int(available * HEADROOM) if separate else 0)
    _refuse_beyond_machine("host memory", host + (0 if separate else capacity), available, "the host")
    disk = config.disk_bytes or device.storage.free_bytes(offload_dir)
    return {
        "device": Tier("device", capacity, device.empty, REMEDIES["device"]),
        "host": Tier("host", host, device.host_empty, REMEDIES["host"]),
        "disk": Tier("disk", disk, device.host_empty, REMEDIES["disk"]),
    }


def _refuse_beyond_machine(what: str, asked: int, available: int, where: str) -> None:
    if asked > available:
        raise OutOfMemoryError(
            f"the {what} limit is {format_bytes(asked)} and only {format_bytes(available)} are free on '{where}'; "
            "lower the limit or free memory"
        )


def _sampler(config: EngineConfig, spec: ModelSpec, device: Device, capacity: int) -> Sampler:
    row = Sampler(spec.vocab_size, device.torch_device, 1).workspace_bytes
    most = max(1, min(config.max_sequences, MAX_ROWS, int(capacity * SAMPLER_SHARE / row)))
    return Sampler(spec.vocab_size, device.torch_device, most, margin=config.confidence == "margin")


def activation_rows(config: EngineConfig) -> tuple[int, int, int]:
    """Rows of the largest sweep on device, host and disk.

    Raises ConfigError if there is no room for all, which takes whole tiles into account.
    """
    most = config.prefill_rows + config.max_sequences
    host, disk = config.activation_host_rows, config.activation_disk_rows
    if config.activation_rows is None or config.activation_rows >= most:
        return most, 0, 0
    device = config.activation_rows
    tile = min(config.tile_rows, most)
    whole = sum(rows // tile * tile for rows in (device, host, disk))
    if whole < most:
        raise ConfigError(
            f"activation_rows, activation_host_rows and activation_disk_rows hold {whole} rows in whole tiles of "
            f"{tile}; a sweep has up to {most} (prefill_rows + max_sequences). Raise one of them"
        )
    return device, host, disk


def activation_bytes(spec: ModelSpec, config: EngineConfig, device: Device, context: int, answers: int = 1) -> int:
    """Upper bound of what a sweep's hidden states, scores and logits take, beside weights, KV and the workspaces.

    ``answers`` are the heads that each row's logits are made of.
    """
    rows = config.prefill_rows + config.max_sequences
    tile = min(rows, config.tile_rows)
    width = 2 * (spec.q_size + 2 * spec.kv_size) + 3 * spec.mlp_size
    hidden = (2 * tile + 2 * activation_rows(config)[0]) * spec.hidden_size
    scores = 2 * query_rows(spec.n_heads, context) * spec.n_heads * context
    logits = answers * config.max_sequences * spec.vocab_size
    return (hidden + tile * width + scores + logits) * device.dtype.itemsize
