"""Which checkpoint tensors make up which engine tensor, as data.

The engine multiplies by fused matrices (query, key and value rows in one; gate and up rows in one) and places weights
by *group*: the attention or the MLP of a layer, the embedding, the head. Source names here are those that a
causal-LM class of transformers writes; ``Naming`` turns them into the names a checkpoint has.
"""

import math
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import CheckpointError
from ..spec import Exit, ModelSpec

if TYPE_CHECKING:  # the index imports torch, which a planner does without
    from .index import Checkpoint

ANCHOR = "embed_tokens.weight"
"""Every model has it once, directly under its trunk: it shows what the trunk is called."""
ADAPTER = "adapter."
"""What the names of an exit's adapter begin with."""
HARMLESS = re.compile(r"\.(rotary_emb\.inv_freq|masked_bias|attn\.bias)$")
"""Buffers that old exports saved beside the parameters; they follow from the config."""
SHOWN = 3
"""So many names stand in an error message."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A whole checkpoint tensor that becomes rows ``[row, row + shape[0])`` of a fused tensor."""

    source: str
    shape: Shape
    row: int


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """One engine tensor. Its parts cover its rows without a gap, in order."""

    name: str
    shape: Shape
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


Group = tuple[FusedTensor, ...]


@dataclass(frozen=True, slots=True)
class _Names:
    """What a family calls the modules of its trunk. Those of a layer follow ``layers.N.``."""

    trunk: str
    attention_norm: str
    attention_out: str
    mlp_norm: str
    mlp_up: tuple[str, ...]
    mlp_down: str
    final_norm: str


_LLAMA = _Names(
    trunk="model.",
    attention_norm="input_layernorm",
    attention_out="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    mlp_up=("mlp.gate_proj", "mlp.up_proj"),
    mlp_down="mlp.down_proj",
    final_norm="norm",
)
_OPT = _Names(
    trunk="model.decoder.",
    attention_norm="self_attn_layer_norm",
    attention_out="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    mlp_up=("fc1",),
    mlp_down="fc2",
    final_norm="final_layer_norm",
)


def _names(spec: ModelSpec) -> _Names:
    return _OPT if spec.architecture == "opt" else _LLAMA


def attention_group(spec: ModelSpec, layer: int) -> Group:
    """norm [H], qkv [q_size + 2 * kv_size, H], q_norm and k_norm [head_dim] if any, out [H, q_size], and biases."""
    names = _names(spec)
    at = f"{names.trunk}layers.{layer}."
    sources = tuple(f"{at}self_attn.{letter}_proj" for letter in "qkv")
    rows = (spec.q_size, spec.kv_size, spec.kv_size)
    head_norms: Group = ()
    if spec.qk_norm:
        head_norms = tuple(
            _whole(f"{letter}_norm.weight", f"{at}self_attn.{letter}_norm.weight", (spec.head_dim,)) for letter in "qk"
        )
    return (
        *_norm(spec, at + names.attention_norm),
        *_linear("qkv", sources, rows, spec.hidden_size, spec.qkv_bias),
        *head_norms,
        *_linear("out", (at + names.attention_out,), (spec.hidden_size,), spec.q_size, spec.out_bias),
    )


def mlp_group(spec: ModelSpec, layer: int) -> Group:
    """norm [H], up [2 * mlp, H] (gate rows, then up rows) or [mlp, H] if not gated, down [H, mlp], and biases."""
    names = _names(spec)
    at = f"{names.trunk}layers.{layer}."
    sources = tuple(at + name for name in names.mlp_up)
    return (
        *_norm(spec, at + names.mlp_norm),
        *_linear("up", sources, (spec.mlp_size,) * len(sources), spec.hidden_size, spec.mlp_bias),
        *_linear("down", (at + names.mlp_down,), (spec.hidden_size,), spec.mlp_size, spec.mlp_bias),
    )


def embedding_group(spec: ModelSpec) -> Group:
    """tokens [V, H], and positions [max_positions + position_offset, H] where they are learned."""
    trunk = _names(spec).trunk
    tokens = _whole("tokens.weight", f"{trunk}embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
    if spec.rope is not None:
        return (tokens,)
    rows = spec.max_positions + spec.position_offset
    return (tokens, _whole("positions.weight", f"{trunk}embed_positions.weight", (rows, spec.hidden_size)))


def head_group(spec: ModelSpec) -> Group:
    """The final norm [H], an exit's adapter if it has one, and lm_head [V, H] unless it is tied to the embedding."""
    norm = (*_norm(spec, _names(spec).trunk + _names(spec).final_norm), *_adapter(spec))
    if spec.tied:
        return norm
    return (*norm, _whole("lm_head.weight", "lm_head.weight", (spec.vocab_size, spec.hidden_size)))


def _adapter(spec: ModelSpec) -> Group:
    """linear [H, H], up [2 * adapter, H] (gate rows, then up rows), down [H, adapter]."""
    hidden, width = spec.hidden_size, spec.adapter_size
    shapes = {"linear": (hidden, hidden), "up": (2 * width, hidden), "down": (hidden, width)} if width else {}
    return tuple(_whole(f"adapter.{name}", f"{ADAPTER}{name}.weight", shape) for name, shape in shapes.items())


def head_elements(spec: ModelSpec, end: Exit) -> int:
    """Elements of what an exit's head has of its own before the LM head, a block left out."""
    if end.kind == "shared":
        return 0
    return sum(tensor.size for tensor in head_group(replace(spec.at(end), tied=True)))


def all_groups(spec: ModelSpec) -> Iterator[Group]:
    """Every group of the model in the order a token visits them."""
    yield embedding_group(spec)
    for layer in range(spec.n_layers):
        yield attention_group(spec, layer)
        yield mlp_group(spec, layer)
    yield head_group(spec)


def _norm(spec: ModelSpec, source: str) -> Group:
    kinds = ("weight", "bias") if spec.norm == "layer" else ("weight",)
    return tuple(_whole(f"norm.{kind}", f"{source}.{kind}", (spec.hidden_size,)) for kind in kinds)


def _linear(name: str, sources: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool) -> Group:
    """A product's weight [sum(rows), columns], and its bias [sum(rows)]: the sources below one another."""
    weight = _stack(f"{name}.weight", sources, "weight", rows, (columns,))
    return (weight, _stack(f"{name}.bias", sources, "bias", rows, ())) if bias else (weight,)


def _stack(name: str, sources: tuple[str, ...], kind: str, rows: tuple[int, ...], rest: Shape) -> FusedTensor:
    parts, row = [], 0
    for source, count in zip(sources, rows, strict=True):
        parts.append(Part(f"{source}.{kind}", (count, *rest), row))
        row += count
    return FusedTensor(name, (row, *rest), tuple(parts))


def _whole(name: str, source: str, shape: Shape) -> FusedTensor:
    return FusedTensor(name, shape, (Part(source, shape, 0),))


@dataclass(frozen=True, slots=True)
class Naming:
    """Turns the layout's source names into a checkpoint's: some were saved from an inner or an outer module."""

    trunk: str
    outer: str

    @classmethod
    def of(cls, names: Iterable[str]) -> "Naming":
        """The naming these tensor names follow. Raises CheckpointError if no single trunk is found."""
        anchors = sorted(name for name in names if name == ANCHOR or name.endswith("." + ANCHOR))
        if len(anchors) != 1:
            raise CheckpointError(
                f"a language model's checkpoint has one tensor named …{ANCHOR}; this one has "
                f"{_first(anchors) if anchors else 'none'}"
            )
        trunk = anchors[0].removesuffix(ANCHOR)
        return cls(trunk, outer=trunk.removesuffix("decoder.").removesuffix("model."))

    def __call__(self, source: str) -> str:
        """The checkpoint's name of a source tensor."""
        for canonical in (_OPT.trunk, _LLAMA.trunk):  # the longer one first
            if source.startswith(canonical):
                return self.trunk + source.removeprefix(canonical)
        return self.outer + source


def check(checkpoint: "Checkpoint", spec: ModelSpec) -> None:
    """Raises CheckpointError unless every needed tensor is there in its shape, and no tensor that would go unused.

    A bias that the config does not declare, a layer too many or a projection of another family all show up as tensors
    that nothing uses; ignoring them would give wrong output without a word.
    """
    naming = Naming.of(checkpoint.names)
    needed = {naming(part.source): part for group in all_groups(spec) for tensor in group for part in tensor.parts}
    refuse_missing(checkpoint, needed)
    for name, part in needed.items():
        check_tensor(checkpoint, name, part.shape)
    refuse_unused(checkpoint, spec, needed)


def refuse_unused(checkpoint: "Checkpoint", spec: ModelSpec, needed: Container[str]) -> None:
    """Raises CheckpointError if the checkpoint has tensors that are not among the needed ones, nor harmless."""
    harmless = {Naming.of(checkpoint.names)("lm_head.weight")} if spec.tied else set()
    unused = [
        name for name in checkpoint.names if name not in needed and name not in harmless and not HARMLESS.search(name)
    ]
    if unused:
        raise CheckpointError(
            f"{checkpoint.directory} has {len(unused)} tensors that a '{spec.architecture}' model of {spec.n_layers} "
            f"layers with this config does not use: {_first(unused)}; config.json and weights do not belong together"
        )


def refuse_missing(checkpoint: "Checkpoint", needed: Iterable[str]) -> None:
    """Raises CheckpointError if the checkpoint lacks any of these tensors."""
    missing = [name for name in needed if name not in checkpoint]
    if missing:
        raise CheckpointError(
            f"{checkpoint.directory} lacks {len(missing)} tensors that its config.json needs: {_first(missing)}; "
            f"config.json and weights do not belong together, or the download is incomplete"
        )


def check_tensor(checkpoint: "Checkpoint", name: str, shape: Shape) -> None:
    """Raises CheckpointError unless the tensor has this shape and is floating point."""
    info = checkpoint.info(name)
    if info.shape != shape:
        raise CheckpointError(
            f"{info.file}: tensor '{name}' has shape {list(info.shape)}, config.json needs {list(shape)}"
        )
    if not info.dtype.is_floating_point:
        raise CheckpointError(
            f"{info.file}: tensor '{name}' has type {info.dtype}; weights must be floating point "
            f"(use the model's unquantised safetensors or its GGUF)"
        )


def _first(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
