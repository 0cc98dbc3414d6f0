"""Weights of a model as the decoder block wants them, and where a sweep gets them from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .checkpoint.index import Checkpoint
from .checkpoint.layout import Group, attention_group, check, embedding_group, head_group, mlp_group
from .checkpoint.reader import plan_reads, read_many
from .device import Device
from .spec import ModelSpec
from .tiers import Tier


@dataclass(frozen=True, slots=True)
class NormWeights:
    weight: Tensor  # [H]
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The attention group of a layer: its norm, Q, K and V in one matrix, and the output projection."""

    norm: NormWeights
    qkv: Tensor  # [q_size + 2 * kv_size, H]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    out: Tensor  # [H, q_size]
    out_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """The MLP group of a layer: its norm, gate and up in one matrix (up alone if not gated), and down."""

    norm: NormWeights
    up: Tensor  # [2 * mlp, H], gate rows first; [mlp, H] if not gated
    up_bias: Tensor | None
    down: Tensor  # [H, mlp]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention: AttentionWeights
    mlp: MlpWeights


@dataclass(frozen=True, slots=True)
class EmbeddingWeights:
    tokens: Tensor  # [V, H]
    positions: Tensor | None  # [max_positions + position_offset, H]


@dataclass(frozen=True, slots=True)
class HeadWeights:
    norm: NormWeights
    lm_head: Tensor  # [V, H]


MATRICES = frozenset({"qkv.weight", "out.weight", "up.weight", "down.weight", "lm_head.weight"})
"""Engine tensors used by ``Device.linear`` alone."""


class LayerSource(Protocol):
    """Where a sweep gets its layers. ``acquire`` may wait for read-ahead; every acquire is paired with a release."""

    def acquire(self, layer: int) -> LayerWeights: ...
    def release(self, layer: int) -> None: ...


class ResidentLayers:
    """Layers that all stay in fast memory."""

    def __init__(self, layers: list[LayerWeights]) -> None:
        self._layers = layers

    def acquire(self, layer: int) -> LayerWeights:
        return self._layers[layer]

    def release(self, layer: int) -> None:
        return


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """What an executor needs of a model."""

    embedding: EmbeddingWeights
    layers: LayerSource
    head: HeadWeights


def weight_bytes(spec: ModelSpec, dtype: torch.dtype, layers: range) -> int:
    """Bytes of embedding, the layers of the range, final norm and LM head."""
    groups = [embedding_group(spec), head_group(spec)]
    groups += [group(spec, layer) for layer in layers for group in (attention_group, mlp_group)]
    return sum(tensor.size for group in groups for tensor in group) * dtype.itemsize


def load_resident(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    device: Device,
    tier: Tier,
    progress: Callable[[int], None] | None = None,
) -> ModelWeights:
    """Read a whole model into a tier. ``progress`` is told of the bytes read.

    Raises CheckpointError for a checkpoint that does not fit the spec, OutOfMemoryError before reading anything.
    """
    check(checkpoint, spec)
    tier.require(weight_bytes(spec, device.dtype, range(spec.n_layers)), "weights")

    def read(groups: list[Group]) -> list[dict[str, Tensor]]:
        """The tensors of some groups, read together."""
        hosts = [{tensor.name: device.host_empty(tensor.shape) for tensor in group} for group in groups]
        jobs = [job for group, host in zip(groups, hosts, strict=True) for job in plan_reads(checkpoint, group, host)]
        read_many(jobs, progress=progress)
        return [{name: place(name, host.pop(name)) for name in list(host)} for host in hosts]

    def place(name: str, host: Tensor) -> Tensor:
        tier.hold(host.nbytes, "weights")
        return device.place_matrix(host) if name in MATRICES else device.place(host)

    embedding = embedding_weights(read([embedding_group(spec)])[0])
    layers = []
    for i in range(spec.n_layers):
        attention, mlp = read([attention_group(spec, i), mlp_group(spec, i)])
        layers.append(LayerWeights(attention_weights(attention), mlp_weights(mlp)))
    head = head_weights(read([head_group(spec)])[0], embedding)
    return ModelWeights(embedding, ResidentLayers(layers), head)


def _norm(tensors: Mapping[str, Tensor]) -> NormWeights:
    return NormWeights(tensors["norm.weight"], tensors.get("norm.bias"))


def attention_weights(tensors: Mapping[str, Tensor]) -> AttentionWeights:
    """The tensors of ``checkpoint.layout.attention_group`` by field."""
    return AttentionWeights(
        norm=_norm(tensors),
        qkv=tensors["qkv.weight"],
        qkv_bias=tensors.get("qkv.bias"),
        q_norm=tensors.get("q_norm.weight"),
        k_norm=tensors.get("k_norm.weight"),
        out=tensors["out.weight"],
        out_bias=tensors.get("out.bias"),
    )


def mlp_weights(tensors: Mapping[str, Tensor]) -> MlpWeights:
    """The tensors of ``checkpoint.layout.mlp_group`` by field."""
    return MlpWeights(
        norm=_norm(tensors),
        up=tensors["up.weight"],
        up_bias=tensors.get("up.bias"),
        down=tensors["down.weight"],
        down_bias=tensors.get("down.bias"),
    )


def embedding_weights(tensors: Mapping[str, Tensor]) -> EmbeddingWeights:
    """The tensors of ``checkpoint.layout.embedding_group`` by field."""
    return EmbeddingWeights(tensors["tokens.weight"], tensors.get("positions.weight"))


def head_weights(tensors: Mapping[str, Tensor], embedding: EmbeddingWeights) -> HeadWeights:
    """The tensors of ``checkpoint.layout.head_group``; a tied LM head is the token embedding."""
    return HeadWeights(_norm(tensors), tensors.get("lm_head.weight", embedding.tokens))
