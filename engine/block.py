"""The decoder block: one for every supported architecture, on all rows of a sweep at once."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .batch import Cohort, Tile
from .device import Device
from .rope import rotate_
from .spec import ModelSpec
from .weights import AttentionWeights, HeadWeights, MlpWeights, NormWeights

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


def before_head(spec: ModelSpec, w: HeadWeights, hidden: Tensor) -> Tensor:
    """States [R, H] as the LM head wants them: normalised, and through an exit's adapter if it has one."""
    hidden = normalise(spec, w.norm, hidden)
    if w.adapter is None:
        return hidden
    gate, up = F.linear(hidden, w.adapter.up).chunk(2, -1)
    return F.linear(hidden, w.adapter.linear).add_(F.linear(F.silu(gate).mul_(up), w.adapter.down))


@dataclass(frozen=True, slots=True)
class DecoderBlock:
    """A layer, as two functions of its weights."""

    spec: ModelSpec
    device: Device

    def attention(self, w: AttentionWeights, layer: int, tile: Tile, hidden: Tensor) -> Tensor:
        """Hidden states [R, H] of a tile after the attention of ``layer``, whose K and V are stored."""
        spec, linear = self.spec, self.device.linear
        qkv = linear(normalise(spec, w.norm, hidden), w.qkv, w.qkv_bias)  # [R, q + 2 * kv]
        rotated = qkv[:, : spec.q_size + spec.kv_size].view(len(qkv), -1, spec.head_dim)  # [R, n_heads + n_kv, d]
        if w.q_norm is not None and w.k_norm is not None:
            query, keys = rotated[:, : spec.n_heads], rotated[:, spec.n_heads :]
            query.copy_(F.rms_norm(query, (spec.head_dim,), w.q_norm, spec.norm_eps))
            keys.copy_(F.rms_norm(keys, (spec.head_dim,), w.k_norm, spec.norm_eps))
        if tile.angles is not None:
            rotate_(rotated, *tile.angles)
        outputs: list[Tensor] = []
        for cohort in tile.cohorts:
            outputs += self._attend(cohort, qkv[cohort.rows.start - tile.rows.start :][: _count(cohort.rows)], layer)
        return linear(_joined(outputs), w.out, w.out_bias).add_(hidden)

    def _attend(self, cohort: Cohort, qkv: Tensor, layer: int) -> list[Tensor]:
        """Attention outputs [rows, q_size] of the cohort's groups, in row order, computed where its KV lives."""
        spec, home = self.spec, cohort.home
        near = home.device is self.device
        if not near:
            qkv = self.device.to_host(qkv)
        with home.open(layer, cohort.number) as pool:
            home.layout.write(pool, cohort.kv_rows, qkv[:, spec.q_size :].reshape(-1, spec.head_dim))
            outputs = [group.attend(qkv, home.layout, pool) for group in cohort.attention[spec.windows[layer]]]
        return outputs if near else [self.device.from_host(_joined(outputs))]

    def mlp(self, w: MlpWeights, tile: Tile, hidden: Tensor) -> Tensor:
        """Hidden states [R, H] of a tile after a layer's MLP."""
        spec, linear = self.spec, self.device.linear
        up = linear(normalise(spec, w.norm, hidden), w.up, w.up_bias)  # [R, 2 * mlp] or [R, mlp]
        act = _ACTIVATIONS[spec.activation]
        inner = act(up[:, : spec.mlp_size]).mul_(up[:, spec.mlp_size :]) if spec.gated_mlp else act(up)
        return linear(inner, w.down, w.down_bias).add_(hidden)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _count(rows: slice) -> int:
    return int(rows.stop - rows.start)
