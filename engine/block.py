"""The decoder block: one function for every supported architecture, on all rows of a sweep at once."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import AttentionGroup
from .batch import Batch
from .kv import KVCache
from .rope import rotate_
from .spec import ModelSpec
from .weights import AttentionWeights, LayerWeights, MlpWeights, NormWeights

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def decoder_block(
    spec: ModelSpec, weights: LayerWeights, hidden: Tensor, batch: Batch, kv: KVCache, layer: int, scratch: Tensor
) -> Tensor:
    """Hidden states [R, H] after one layer; stores the rows' K and V. ``hidden`` may be overwritten."""
    hidden = _attention(spec, weights.attention, hidden, batch, kv, layer, scratch)
    return _mlp(spec, weights.mlp, hidden)


def normalise(spec: ModelSpec, norm: NormWeights, hidden: Tensor) -> Tensor:
    """RMS or layer norm of hidden states [R, H], as the architecture has it."""
    if spec.norm == "rms":
        return F.rms_norm(hidden, (spec.hidden_size,), norm.weight, spec.norm_eps)
    return F.layer_norm(hidden, (spec.hidden_size,), norm.weight, norm.bias, spec.norm_eps)


def _attention(
    spec: ModelSpec, w: AttentionWeights, hidden: Tensor, batch: Batch, kv: KVCache, layer: int, scratch: Tensor
) -> Tensor:
    qkv = F.linear(normalise(spec, w.norm, hidden), w.qkv, w.qkv_bias)  # [R, q + 2 * kv]
    rows = qkv.shape[0]
    rotated = qkv[:, : spec.q_size + spec.kv_size].view(rows, -1, spec.head_dim)  # [R, n_heads + n_kv, d]
    if w.q_norm is not None and w.k_norm is not None:
        query, keys = rotated[:, : spec.n_heads], rotated[:, spec.n_heads :]
        query.copy_(F.rms_norm(query, (spec.head_dim,), w.q_norm, spec.norm_eps))
        keys.copy_(F.rms_norm(keys, (spec.head_dim,), w.k_norm, spec.norm_eps))
    if batch.angles is not None:
        rotate_(rotated, *batch.angles)
    kv.write(layer, batch.kv_rows, qkv[:, spec.q_size :].reshape(-1, spec.head_dim))
    attended = _attend(spec, batch.attention[spec.windows[layer]], qkv, kv, layer, scratch)
    return F.linear(attended, w.out, w.out_bias).add_(hidden)


def _attend(
    spec: ModelSpec, groups: list[AttentionGroup], qkv: Tensor, kv: KVCache, layer: int, scratch: Tensor
) -> Tensor:
    if len(groups) == 1:
        return groups[0].attend(spec, qkv, kv, layer, scratch)
    return torch.cat([group.attend(spec, qkv, kv, layer, scratch) for group in groups])  # groups lie in row order


def _mlp(spec: ModelSpec, w: MlpWeights, hidden: Tensor) -> Tensor:
    up = F.linear(normalise(spec, w.norm, hidden), w.up, w.up_bias)
    act = _ACTIVATIONS[spec.activation]
    inner = act(up[:, : spec.mlp_size]).mul_(up[:, spec.mlp_size :]) if spec.gated_mlp else act(up)
    return F.linear(inner, w.down, w.down_bias).add_(hidden)
