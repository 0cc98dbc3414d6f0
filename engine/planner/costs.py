"""What a block of sequences costs, as linear forms of where weights and KV are: the planner's cost model.

After the cost model of FlexGen (section 4.3) with what this engine does: any decoder's shapes, rates that depend on the
number of rows, prompts in chunks, a disk that reads and writes in turn, KV rewritten in whole blocks, codes in place of
weights, and the time of small operations. A sweep takes as long as its slowest resource.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..config import TILE_ROWS, Schedule, TierName
from ..kv import BLOCK, KVFormat, blocks_for
from ..quant.matrix import KERNEL_ROWS
from ..sizes import Sizes
from ..units import Unit
from .hardware import Hardware
from .job import Job
from .processor import Processor, small_bytes

Resource = Literal["compute", "disk", "to device", "to host"]
RESOURCES: tuple[Resource, ...] = ("compute", "disk", "to device", "to host")
Kind = Literal["embedding", "attention", "mlp", "head"]


@dataclass(frozen=True, slots=True)
class Option:
    """What is tried one by one; where weights and KV go is then solved for."""

    block: int
    """Sequences that run together."""
    prefill_rows: int
    schedule: Schedule = "continuous"
    delegate: bool = True
    kv_int4: bool = False
    activations: TierName = "device"
    """Where the hidden states are that do not fit a tile."""
    read_ahead: bool = True


@dataclass(slots=True)
class Form:
    """Seconds: ``fixed``, and so many for each byte of weights and for each sequence whose KV is on a tier."""

    fixed: float = 0.0
    weights: dict[TierName, float] = field(default_factory=dict)
    kv: dict[TierName, float] = field(default_factory=dict)
    lookups: float = 0.0
    """If the embedding is on disk, where each token is one small read."""

    def seconds(
        self, weights: Mapping[TierName, float], sequences: Mapping[TierName, float], looked_up: int = 0
    ) -> float:
        """For so many bytes of weights and so many sequences on each tier; ``looked_up`` is 1 if the embedding is on
        disk."""
        moved = sum(rate * weights.get(tier, 0) for tier, rate in self.weights.items())
        attended = sum(rate * sequences.get(tier, 0) for tier, rate in self.kv.items())
        return self.fixed + moved + attended + self.lookups * looked_up


Forms = dict[Resource, Form]


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one option. ``prefill`` is of the whole block, ``decode`` of an average sweep, ``sweeps`` how many of each."""

    prefill: Forms
    decode: Forms
    prefill_sweeps: int
    decode_sweeps: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """Of one model on one machine for one job."""

    sizes: Sizes
    hardware: Hardware
    job: Job

    def costs(self, option: Option) -> Costs:
        rows = option.block * self.job.prompt_len
        prefill_sweeps = -(-rows // option.prefill_rows)
        return Costs(
            prefill=self._prefill(option, prefill_sweeps),
            decode=self._decode(option),
            prefill_sweeps=prefill_sweeps,
            decode_sweeps=self.job.gen_len - 1,
        )

    def weights_bytes(self, kind: Kind) -> int:
        """Of a unit of that kind."""
        return self.sizes.matrices(Unit(kind))

    def kv_bytes(self, option: Option, positions: int) -> int:
        """KV of so many positions of a sequence, all layers."""
        return blocks_for(positions) * self.block_bytes(option)

    def block_bytes(self, option: Option) -> int:
        """A block of KV over all layers."""
        spec = self.sizes.spec
        return KVFormat(spec, self.sizes.dtype, option.kv_int4).block_bytes * spec.n_layers

    def lookups_s(self, tokens: int) -> float:
        """Seconds of looking tokens up in tables on disk, of which there are two where positions are learned."""
        return (1 if self.sizes.spec.rope else 2) * tokens * self.hardware.disk_latency_s

    def _decode(self, option: Option) -> Forms:
        job, layers = self.job, self.sizes.spec.n_layers
        positions = job.prompt_len + -(-job.gen_len // 2)
        read, written = self.kv_bytes(option, positions), self.block_bytes(option)
        processor = self.hardware.device
        compute = Form(layers * self._layer_s(processor, option.block) + self._head_s(processor, option.block))
        compute.fixed += processor.sweep_s + option.block * processor.row_s
        forms: Forms = {resource: Form() for resource in RESOURCES} | {"compute": compute}
        self._weights(forms, 1, option.block)
        compute.lookups = self.lookups_s(option.block)
        attended = self._attention_s(processor, option, positions)
        compute.kv = dict.fromkeys(("device", "host", "disk"), attended)
        self._kv_traffic(forms, option, read, written)
        if self.hardware.host is not None and option.delegate:
            spec, itemsize = self.sizes.spec, self.sizes.dtype.itemsize
            there = (spec.q_size + 2 * spec.kv_size) * itemsize * layers / self.hardware.to_host
            back = spec.q_size * itemsize * layers / self.hardware.to_device
            compute.kv["host"] = self._attention_s(self.hardware.host, option, positions) + there + back
        return forms

    def _prefill(self, option: Option, sweeps: int) -> Forms:
        spec, job, processor = self.sizes.spec, self.job, self.hardware.device
        rows = min(option.prefill_rows, option.block * job.prompt_len)
        tile = min(rows, TILE_ROWS)
        per_sweep = spec.n_layers * (rows / tile) * self._layer_s(processor, tile) + processor.sweep_s
        whole = option.block * job.prompt_len / rows
        attention = 4 * spec.q_size * spec.n_layers * job.prompt_len**2 / 2
        compute = Form(whole * per_sweep + self._head_s(processor, option.block))
        compute.fixed += option.block * attention / processor.chunk_attention(attention / spec.n_layers)
        forms: Forms = {resource: Form() for resource in RESOURCES} | {"compute": compute}
        self._weights(forms, sweeps, rows)
        compute.lookups = self.lookups_s(option.block * job.prompt_len)
        chunks = -(-job.prompt_len // tile)
        again = (
            self.kv_bytes(option, job.prompt_len) * (chunks - 1) // 2
        )  # earlier chunks are attended to by later ones
        self._kv_traffic(forms, option, again, self.kv_bytes(option, job.prompt_len))
        self._activations(forms, option)
        return forms

    def _weights(self, forms: Forms, sweeps: int, rows: int) -> None:
        """Reading weights ``sweeps`` times. ``rows`` decide whether codes are expanded."""
        hardware = self.hardware
        if hardware.disk_read:
            forms["disk"].weights["disk"] = sweeps / hardware.disk_read
            forms["compute"].weights["disk"] = sweeps * hardware.read_cpu_s
        over = hardware.to_device or hardware.device.memory_bytes_s / 2
        forms["to device"].weights["host"] = sweeps / over
        if not self.sizes.quantisation:  # what is not kept lies as it was read
            more = self._as_read_s(rows)
            forms["compute"].weights["host"] = sweeps * more
            forms["compute"].weights["disk"] = forms["compute"].weights.get("disk", 0.0) + sweeps * more
        if hardware.separate:
            forms["to device"].weights["disk"] = sweeps / over
        quantisation = self.sizes.quantisation
        if quantisation and not self._packed(rows):
            elements = self.sizes.spec.n_layers * self._layer_elements
            forms["compute"].fixed += sweeps * elements / hardware.device.expand_elements_s

    def _kv_traffic(self, forms: Forms, option: Option, read: int, written: int) -> None:
        """A sequence's KV on a tier is read and written: so many bytes."""
        hardware = self.hardware
        if hardware.disk_read:
            forms["disk"].kv["disk"] = read / hardware.disk_read + written / hardware.disk_write
            forms["compute"].kv["disk"] = forms["compute"].kv.get("disk", 0.0) + read * hardware.read_cpu_s
        over = hardware.to_device or hardware.device.memory_bytes_s / 2
        staged: tuple[TierName, ...] = ("disk",) if option.delegate else ("disk", "host")
        for tier in staged:
            if hardware.separate or tier == "host":
                forms["to device"].kv[tier] = read / over
                if hardware.separate:
                    forms["to host"].kv[tier] = written / hardware.to_host
                else:
                    forms["to device"].kv[tier] += written / over

    def _activations(self, forms: Forms, option: Option) -> None:
        """Hidden states that are not on the device are brought and stored for each half of each layer."""
        if option.activations == "device":
            return
        spec, hardware = self.sizes.spec, self.hardware
        n_bytes = option.block * self.job.prompt_len * spec.hidden_size * self.sizes.dtype.itemsize * 2 * spec.n_layers
        if option.activations == "disk":
            forms["disk"].fixed += n_bytes / hardware.disk_read + n_bytes / hardware.disk_write
        over = hardware.to_device or hardware.device.memory_bytes_s / 2
        if hardware.separate or option.activations == "host":
            forms["to device"].fixed += n_bytes / over
            forms["to host"].fixed += n_bytes / (hardware.to_host or over)

    def _layer_s(self, processor: Processor, rows: int) -> float:
        """A layer without its attention, for so many rows."""
        spec = self.sizes.spec
        products = 4 * processor.product_s(self._kind(rows), rows, self._layer_elements // 4)
        small = small_bytes(spec, rows, self.sizes.dtype.itemsize) / processor.memory_bytes_s
        return products + small + processor.layer_s * max(1, -(-rows // TILE_ROWS))

    def _as_read_s(self, rows: int) -> float:
        """Seconds that a byte of weights takes more in products when it is not in the fastest layout."""
        processor, elements, kind = self.hardware.device, self._layer_elements // 4, self._kind(rows)
        more = processor.product_s(kind, rows, elements, kept=False) - processor.product_s(kind, rows, elements)
        return more / (elements * self.sizes.dtype.itemsize)

    def _head_s(self, processor: Processor, rows: int) -> float:
        spec = self.sizes.spec
        dtype = str(self.sizes.dtype).removeprefix("torch.")
        return processor.product_s(dtype, rows, spec.vocab_size * spec.hidden_size)

    def _attention_s(self, processor: Processor, option: Option, positions: int) -> float:
        """Of one sequence of a block in one sweep, all layers."""
        spec = self.sizes.spec
        one = positions * spec.kv_elements_per_token * self.sizes.dtype.itemsize
        seconds = spec.n_layers * one / processor.decode_attention(one * option.block)
        if option.kv_int4:
            seconds += spec.n_layers * positions * spec.kv_elements_per_token / processor.expand_elements_s
        return seconds

    @property
    def _layer_elements(self) -> int:
        spec = self.sizes.spec
        attention = spec.hidden_size * (spec.q_size + 2 * spec.kv_size) + spec.q_size * spec.hidden_size
        return attention + (3 if spec.gated_mlp else 2) * spec.hidden_size * spec.mlp_size

    def _packed(self, rows: int) -> bool:
        """Whether products with so many rows go by the codes themselves."""
        quantisation = self.sizes.quantisation
        if quantisation is None or rows > KERNEL_ROWS or self.sizes.dtype != torch.bfloat16:
            return False
        return f"int{quantisation.scheme.bits}" in self.hardware.device.products

    def _kind(self, rows: int) -> str:
        if self._packed(rows) and self.sizes.quantisation:
            return f"int{self.sizes.quantisation.scheme.bits}"
        return str(self.sizes.dtype).removeprefix("torch.")


def kv_blocks_of(option: Option, job: Job) -> float:
    """Blocks of KV that a sequence of a block takes on average when most are needed.

    Where sequences are let in one after another their lengths are spread evenly between the prompt's and the last.
    """
    if option.schedule != "diagonal":
        return float(blocks_for(job.context))
    return (job.prompt_len + job.gen_len / 2) / BLOCK + 1.5
