"""The least time a run can take: what must be read at the disk's rate, or the products at the processor's."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.checkpoint.store import resolve
from engine.kv import BLOCK, KVFormat
from engine.sizes import Sizes
from engine.spec import ModelSpec
from engine.units import Unit


@dataclass(frozen=True, slots=True)
class Shape:
    """What a sweep through a model costs. Bytes are bf16."""

    n_layers: int
    hidden: int
    mlp: int
    q_size: int
    vocab: int
    layers_bytes: int
    """Matrices of all layers."""
    head_bytes: int
    kv_token_bytes: int
    """KV of one position, all layers."""

    @classmethod
    def of(cls, model: str) -> "Shape":
        spec = ModelSpec.from_directory(resolve(model))
        layer = sum(Sizes(spec, torch.bfloat16).matrices(Unit(kind)) for kind in ("attention", "mlp"))
        return cls(
            n_layers=spec.n_layers,
            hidden=spec.hidden_size,
            mlp=spec.mlp_size,
            q_size=spec.q_size,
            vocab=spec.vocab_size,
            layers_bytes=layer * spec.n_layers,
            head_bytes=2 * spec.vocab_size * spec.hidden_size,
            kv_token_bytes=KVFormat(spec, torch.bfloat16).block_bytes * spec.n_layers // BLOCK,
        )

    @property
    def weights_bytes(self) -> int:
        """What every sweep multiplies by; the embedding's rows are next to nothing."""
        return self.layers_bytes + self.head_bytes


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured around a run, within its limit."""

    disk_bytes_s: float
    prefill_flops_s: float
    """At the rows of a prefill tile."""
    decode_flops_s: float
    """At one row for each sequence."""
    disk_before_after: tuple[float, float]
    """The two measurements that ``disk_bytes_s`` is the mean of: a shared disk has bursts."""
    base_bytes: int
    """What Python and torch take themselves; nobody can keep weights there."""

    def disk_averaged(self, after: "Rates") -> "Rates":
        """With the disk's rate as the mean of this and of what was measured after the run."""
        both = (self.disk_bytes_s, after.disk_bytes_s)
        return replace(self, disk_bytes_s=sum(both) / 2, disk_before_after=both)


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds at least, of a whole run and of its decode alone."""

    total_s: float
    decode_s: float
    limit: str
    """What decides the total: "disk" or "products"."""
    read_bytes: int


def prefill_rows(batch: int, prompt: int) -> int:
    """Rows at which the prefill's products are measured."""
    return min(1024, batch * prompt)


def floor(shape: Shape, rates: Rates, limit_bytes: int, batch: int, prompt: int, n_tokens: int) -> Floor:
    """For ``batch`` prompts of ``prompt`` tokens and ``n_tokens`` new ones each.

    One sweep makes the first tokens of all, one more each further token of all. A sweep reads the weights, and in
    decode the KV so far, less what the limit has room to keep. Reading and products overlap perfectly, and what is
    written costs nothing.
    """
    room = limit_bytes - rates.base_bytes
    lengths = range(prompt + 1, prompt + n_tokens)
    decode_bytes = sum(max(0, shape.weights_bytes + batch * length * shape.kv_token_bytes - room) for length in lengths)
    prefill_bytes = max(0, shape.weights_bytes - room)
    attention = 4 * shape.q_size * shape.n_layers  # operations of one query and one position
    decode_s = (
        batch
        * sum(shape.weights_bytes + attention * length for length in lengths)  # 2 bytes and 2 operations an element
        / rates.decode_flops_s
    )
    prefill_s = (
        batch
        * (shape.layers_bytes * prompt + shape.head_bytes + attention * prompt * (prompt + 1) // 2)
        / rates.prefill_flops_s
    )
    read_s = (prefill_bytes + decode_bytes) / rates.disk_bytes_s
    return Floor(
        total_s=max(read_s, prefill_s + decode_s),
        decode_s=max(decode_bytes / rates.disk_bytes_s, decode_s),
        limit="disk" if read_s > prefill_s + decode_s else "products",
        read_bytes=prefill_bytes + decode_bytes,
    )


def weights_on_disk(directory: Path) -> int:
    """Bytes of the checkpoint's weight files."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))
