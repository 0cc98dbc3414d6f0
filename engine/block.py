"""The decoder block: one for every supported architecture, on all rows of a sweep at once."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import AttentionGroup
from .batch import Batch
from .device import Device
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


def normalise(spec: ModelSpec, norm: NormWeights, hidden: Tensor) -> Tensor:
    """RMS or layer norm of hidden states [R, H], as the architecture has it."""
    if spec.norm == "rms":
        return F.rms_norm(hidden, (spec.hidden_size,), norm.weight, spec.norm_eps)
    return F.layer_norm(hidden, (spec.hidden_size,), norm.weight, norm.bias, spec.norm_eps)


@dataclass(frozen=True, slots=True)
class DecoderBlock:
    """A layer as a function of its weights."""

    spec: ModelSpec
    device: Device
    kv: KVCache

    def __call__(self, weights: LayerWeights, hidden: Tensor, batch: Batch, layer: int) -> Tensor:
        """Hidden states [R, H] after layer number ``layer``, whose K and V of these rows are stored."""
        return self._mlp(weights.mlp, self._attention(weights.attention, hidden, batch, layer))

    def _attention(self, w: AttentionWeights, hidden: Tensor, batch: Batch, layer: int) -> Tensor:
        spec, linear = self.spec, self.device.linear
        qkv = linear(normalise(spec, w.norm, hidden), w.qkv, w.qkv_bias)  # [R, q + 2 * kv]
        rotated = qkv[:, : spec.q_size + spec.kv_size].view(len(qkv), -1, spec.head_dim)  # [R, n_heads + n_kv, d]
        if w.q_norm is not None and w.k_norm is not None:
            query, keys = rotated[:, : spec.n_heads], rotated[:, spec.n_heads :]
            query.copy_(F.rms_norm(query, (spec.head_dim,), w.q_norm, spec.norm_eps))
            keys.copy_(F.rms_norm(keys, (spec.head_dim,), w.k_norm, spec.norm_eps))
        if batch.angles is not None:
            rotate_(rotated, *batch.angles)
        self.kv.write(layer, batch.kv_rows, qkv[:, spec.q_size :].reshape(-1, spec.head_dim))
        attended = self._attend(batch.attention[spec.windows[layer]], qkv, layer)
        return linear(attended, w.out, w.out_bias).add_(hidden)

    def _attend(self, groups: list[AttentionGroup], qkv: Tensor, layer: int) -> Tensor:
        """Attention output [R, q_size] of the groups, which lie in row order."""
        outputs = [group.attend(self.spec, qkv, self.kv, layer) for group in groups]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _mlp(self, w: MlpWeights, hidden: Tensor) -> Tensor:
        spec, linear = self.spec, self.device.linear
        up = linear(normalise(spec, w.norm, hidden), w.up, w.up_bias)  # [R, 2 * mlp] or [R, mlp]
        act = _ACTIVATIONS[spec.activation]
        inner = act(up[:, : spec.mlp_size]).mul_(up[:, spec.mlp_size :]) if spec.gated_mlp else act(up)
        return linear(inner, w.down, w.down_bias).add_(hidden)
