"""Random heads for tiny models, and what transformers makes of a model cut at one of them."""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.checkpoint.index import Checkpoint
from engine.checkpoint.layout import attention_group, mlp_group
from engine.exits.heads import FILE
from engine.exits.save import save_heads
from engine.spec import Exit, ModelSpec

WIDTH = 48


def random_tensors(spec: ModelSpec, exits: Sequence[Exit], seed: int = 0) -> dict[str, Tensor]:
    """Named as a file of heads has them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return 0.2 * torch.randn(shape, generator=generator)

    found: dict[str, Tensor] = {}
    for at in exits:
        name, hidden = f"exits.{at.layer}.", spec.hidden_size
        if at.kind == "shared":
            continue
        found[f"{name}norm.weight"] = 1 + draw(hidden)
        if spec.norm == "layer":
            found[f"{name}norm.bias"] = draw(hidden)
        if at.kind == "adapter":
            found[f"{name}linear.weight"] = torch.eye(hidden) + draw(hidden, hidden)
            found[f"{name}up.weight"] = draw(2 * at.adapter_size, hidden)
            found[f"{name}down.weight"] = draw(hidden, at.adapter_size)
        if at.kind == "block":
            groups = (attention_group(spec, 0), mlp_group(spec, 0))
            for part in (part for group in groups for tensor in group for part in tensor.parts):
                rest = part.source.partition("layers.0.")[2]
                norm = "norm" in rest and rest.endswith("weight")
                found[f"{name}block.{rest}"] = draw(*part.shape) + norm
    return found


def add_heads(model: Path, exits: Sequence[Exit], seed: int = 0) -> dict[str, Tensor]:
    """Write random heads beside a model; returns their tensors."""
    spec = ModelSpec.from_directory(model)
    tensors = random_tensors(spec, exits, seed)
    save_heads(model / FILE, Checkpoint(model), spec, exits, tensors)
    return tensors


def exit_logits(model: Path, at: Exit, heads: dict[str, Tensor], tokens: Sequence[int]) -> Tensor:
    """Logits [len(tokens), V] of the model cut at an exit, by transformers' layers and norms, in float32."""
    with torch.inference_mode():
        whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        decoder = getattr(whole.model, "decoder", whole.model)
        final = decoder.norm if hasattr(decoder, "norm") else decoder.final_layer_norm
        own = {name.removeprefix(f"exits.{at.layer}."): t for name, t in heads.items()}
        if at.kind != "shared":
            final.weight.copy_(own["norm.weight"])
            if "norm.bias" in own:
                final.bias.copy_(own["norm.bias"])
        if at.kind == "block":
            block = {name.removeprefix("block."): t for name, t in own.items() if name.startswith("block.")}
            decoder.layers[at.layer].load_state_dict(block)
        decoder.layers = decoder.layers[: at.layer + (at.kind == "block")]
        whole.config.num_hidden_layers = len(decoder.layers)
        if at.kind != "adapter":
            return whole(torch.tensor([list(tokens)])).logits[0]
        state = decoder(torch.tensor([list(tokens)])).last_hidden_state[0]
        gate, up = F.linear(state, own["up.weight"]).chunk(2, -1)
        state = F.linear(state, own["linear.weight"]) + F.linear(F.silu(gate) * up, own["down.weight"])
        return whole.lm_head(state)


def greedy(model: Path, at: Exit, heads: dict[str, Tensor], prompt: Sequence[int], count: int) -> list[int]:
    """So many tokens, the likeliest one at a time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(exit_logits(model, at, heads, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


class Oracle:
    """What transformers' layers and the heads of exits (of all kinds but "block") say after a text."""

    def __init__(self, model: Path, exits: Sequence[Exit], heads: dict[str, Tensor]) -> None:
        self._whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        decoder = getattr(self._whole.model, "decoder", self._whole.model)
        self._final = decoder.norm if hasattr(decoder, "norm") else decoder.final_layer_norm
        self._exits, self._heads = exits, heads
        self.n_layers: int = self._whole.config.num_hidden_layers

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> dict[int, Tensor]:
        """Of the next token [V], by the layers passed: those of every exit, and all."""
        done = self._whole(torch.tensor([list(tokens)]), output_hidden_states=True)
        found = {
            at.layer: self._whole.lm_head(self._head(at, done.hidden_states[at.layer][0, -1])) for at in self._exits
        }
        return found | {self.n_layers: done.logits[0, -1]}

    def _head(self, at: Exit, state: Tensor) -> Tensor:
        own = {name.removeprefix(f"exits.{at.layer}."): t for name, t in self._heads.items()}
        norm = copy.deepcopy(self._final)
        if "norm.weight" in own:
            norm.weight.copy_(own["norm.weight"])
        if "norm.bias" in own:
            norm.bias.copy_(own["norm.bias"])
        state = norm(state)
        if at.kind != "adapter":
            return state
        gate, up = F.linear(state, own["up.weight"]).chunk(2, -1)
        return F.linear(state, own["linear.weight"]) + F.linear(F.silu(gate) * up, own["down.weight"])
