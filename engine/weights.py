"""Weights as the decoder block wants them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


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


def norm_weights(tensors: Mapping[str, Tensor]) -> NormWeights:
    """The norm of a group of ``checkpoint.layout``."""
    return NormWeights(tensors["norm.weight"], tensors.get("norm.bias"))


def attention_weights(tensors: Mapping[str, Tensor]) -> AttentionWeights:
    """The tensors of ``checkpoint.layout.attention_group`` by field."""
    return AttentionWeights(
        norm=norm_weights(tensors),
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
        norm=norm_weights(tensors),
        up=tensors["up.weight"],
        up_bias=tensors.get("up.bias"),
        down=tensors["down.weight"],
        down_bias=tensors.get("down.bias"),
    )
