"""Weights as the decoder block wants them."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .quant.matrix import PackedMatrix

Matrix = Tensor | PackedMatrix
"""A weight [out, in] for ``Device.linear``."""


@dataclass(frozen=True, slots=True)
class NormWeights:
    weight: Tensor  # [H]
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The attention group of a layer: its norm, Q, K and V in one matrix, and the output projection."""

    norm: NormWeights
    qkv: Matrix  # [q_size + 2 * kv_size, H]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    out: Matrix  # [H, q_size]
    out_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """The MLP group of a layer: its norm, gate and up in one matrix (up alone if not gated), and down."""

    norm: NormWeights
    up: Matrix  # [2 * mlp, H], gate rows first; [mlp, H] if not gated
    up_bias: Tensor | None
    down: Matrix  # [H, mlp]
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """What an exit's head makes of the normalised state z for the LM head: linear z + down (silu(gate z) * up z)."""

    linear: Tensor  # [H, H]
    up: Tensor  # [2 * adapter, H], gate rows first
    down: Tensor  # [H, adapter]


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """What a head has before the LM head."""

    norm: NormWeights
    adapter: AdapterWeights | None = None


def head_weights(small: Mapping[str, Tensor]) -> HeadWeights:
    """The tensors of ``checkpoint.layout.head_group`` but the LM head."""
    return HeadWeights(norm_weights(small), adapter_weights(small))


def adapter_weights(small: Mapping[str, Tensor]) -> AdapterWeights | None:
    """The adapter of ``checkpoint.layout.head_group``; None if it has none."""
    if "adapter.linear" not in small:
        return None
    return AdapterWeights(small["adapter.linear"], small["adapter.up"], small["adapter.down"])


def norm_weights(small: Mapping[str, Tensor]) -> NormWeights:
    """The norm of a group of ``checkpoint.layout``."""
    return NormWeights(small["norm.weight"], small.get("norm.bias"))


def attention_weights(small: Mapping[str, Tensor], matrices: Mapping[str, Matrix]) -> AttentionWeights:
    """The tensors of ``checkpoint.layout.attention_group`` by field."""
    return AttentionWeights(
        norm=norm_weights(small),
        qkv=matrices["qkv.weight"],
        qkv_bias=small.get("qkv.bias"),
        q_norm=small.get("q_norm.weight"),
        k_norm=small.get("k_norm.weight"),
        out=matrices["out.weight"],
        out_bias=small.get("out.bias"),
    )


def mlp_weights(small: Mapping[str, Tensor], matrices: Mapping[str, Matrix]) -> MlpWeights:
    """The tensors of ``checkpoint.layout.mlp_group`` by field."""
    return MlpWeights(
        norm=norm_weights(small),
        up=matrices["up.weight"],
        up_bias=small.get("up.bias"),
        down=matrices["down.weight"],
        down_bias=small.get("down.bias"),
    )
