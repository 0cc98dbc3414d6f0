"""Heads while they are trained: their weights, named as a file of heads names them, and what they make of states."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.layout import attention_group, mlp_group
from ..rope import Rope
from ..spec import ExitKind, ModelSpec

FIT_ROWS = 4096
"""Positions that the least-squares map takes in at a time."""
RIDGE = 1e-3
"""Of the mean diagonal, what is added to it."""
Read = Callable[[str], Tensor]
"""Gives a tensor of the model, by its name in ``checkpoint.layout``, in float32."""


@dataclass(slots=True)
class Head:
    """What an exit's head has before the LM head: a norm, that and an adapter, or that after a decoder block."""

    kind: ExitKind
    layer: int
    spec: ModelSpec
    """Of the whole model, which has RMS norms."""
    weights: dict[str, Tensor]
    """In float32."""

    @classmethod
    def start(cls, kind: ExitKind, layer: int, spec: ModelSpec, read: Read, width: int, seed: int) -> "Head":
        """With the model's own final norm; an adapter that does nothing yet, or a block like the trunk's next one."""
        hidden = spec.hidden_size
        weights = {"norm.weight": read("model.norm.weight")}
        if kind == "adapter":
            generator = torch.Generator().manual_seed(seed)
            weights["linear.weight"] = torch.eye(hidden)
            weights["up.weight"] = torch.randn(2 * width, hidden, generator=generator) / math.sqrt(hidden)
            weights["down.weight"] = torch.zeros(hidden, width)
        if kind == "block":
            groups = (attention_group(spec, layer), mlp_group(spec, layer))
            for part in (part for group in groups for tensor in group for part in tensor.parts):
                weights[f"block.{part.source.partition(f'layers.{layer}.')[2]}"] = read(part.source)
        return cls(kind, layer, spec, weights)

    def __call__(self, states: Tensor, lengths: Sequence[int]) -> Tensor:
        """States [N, H] at the exit as the LM head wants them. They are those of texts of these ``lengths``, one after
        the other, which only a block looks at."""
        z = self._norm("norm.weight", self._block(states.float(), lengths) if self.kind == "block" else states.float())
        if self.kind != "adapter":
            return z
        gate, up = F.linear(z, self.weights["up.weight"]).chunk(2, -1)
        return F.linear(z, self.weights["linear.weight"]) + F.linear(F.silu(gate) * up, self.weights["down.weight"])

    def fit(self, states: Tensor, final: Tensor) -> None:
        """Of an adapter, set the linear map to the one from normalised states to final ones with the least squares."""
        hidden = self.spec.hidden_size
        gram, cross = torch.zeros(hidden, hidden), torch.zeros(hidden, hidden)
        for start in range(0, len(states), FIT_ROWS):
            z = self._norm("norm.weight", states[start : start + FIT_ROWS].float())
            gram += z.T @ z
            cross += z.T @ final[start : start + FIT_ROWS].float()
        gram += RIDGE * gram.diagonal().mean() * torch.eye(hidden)
        self.weights["linear.weight"] = torch.linalg.solve(gram, cross).T.contiguous()

    def copy(self) -> "Head":
        return Head(self.kind, self.layer, self.spec, {n: t.detach().clone() for n, t in self.weights.items()})

    def tensors(self) -> dict[str, Tensor]:
        """As a file of heads names them, in bfloat16."""
        return {f"exits.{self.layer}.{name}": tensor.detach().bfloat16() for name, tensor in self.weights.items()}

    @property
    def parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.weights.values())

    def _norm(self, name: str, states: Tensor) -> Tensor:
        weight = self.weights[name]
        return F.rms_norm(states, (len(weight),), weight, self.spec.norm_eps)

    def _linear(self, name: str, states: Tensor) -> Tensor:
        return F.linear(states, self.weights[f"block.{name}.weight"], self.weights.get(f"block.{name}.bias"))

    def _block(self, states: Tensor, lengths: Sequence[int]) -> Tensor:
        """States [N, H] after a decoder block."""
        rows = torch.nn.utils.rnn.pad_sequence([*torch.split(states, list(lengths))], batch_first=True)  # [B, T, H]
        attended = self._attention(self._norm("block.input_layernorm.weight", rows))
        rows = rows + self._linear("self_attn.o_proj", attended)
        z = self._norm("block.post_attention_layernorm.weight", rows)
        inner = F.silu(self._linear("mlp.gate_proj", z)) * self._linear("mlp.up_proj", z)
        rows = rows + self._linear("mlp.down_proj", inner)
        return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])

    def _attention(self, rows: Tensor) -> Tensor:
        """Causal attention of texts [B, T, H] to themselves: [B, T, q_size]. What pads them comes after them."""
        spec, (count, length, _) = self.spec, rows.shape
        query, key, value = (
            self._linear(f"self_attn.{letter}_proj", rows).view(count, length, -1, spec.head_dim) for letter in "qkv"
        )
        if spec.qk_norm:
            query = self._norm("block.self_attn.q_norm.weight", query)
            key = self._norm("block.self_attn.k_norm.weight", key)
        if spec.rope is not None:
            rope = Rope(spec.rope, spec.head_dim, spec.max_positions, rows.device)
            cos, sin = rope.angles(torch.arange(length, device=rows.device), rows.dtype)  # [T, 1, head_dim]
            query, key = (heads * cos + heads.roll(spec.head_dim // 2, -1) * sin for heads in (query, key))
        at = torch.arange(length, device=rows.device)
        back = at[:, None] - at
        seen = (back >= 0) & (back < (spec.windows[self.layer] or length))
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        grouped = spec.n_kv_heads != spec.n_heads
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=grouped)
        return attended.transpose(1, 2).reshape(count, length, -1)
