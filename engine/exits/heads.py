"""Heads of exits, as a safetensors file beside the model's: what it says of itself, checked against the trunk.

Its metadata has an entry ``helios_exits``, a JSON object: ``version``, ``trunk`` (a fingerprint of the model that
the heads were made for), ``exits``, a list of objects with the fields of ``spec.Exit``, and ``frequent``, the tokens
that the model says most often. Tensors of the exit at layer 10 begin with ``exits.10.``: ``norm.weight`` (and
``norm.bias``); ``linear.weight``, ``up.weight``, ``down.weight`` of an adapter, and of a block what a layer of the
model's checkpoint has, after ``block.``.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.index import Checkpoint, TensorInfo, parse_file, read_metadata
from ..checkpoint.layout import ADAPTER, Naming, Part, attention_group, head_group, mlp_group
from ..checkpoint.reader import read_into
from ..errors import CheckpointError, ConfigError
from ..numbers import is_number
from ..spec import EXIT_KINDS, Exit, ModelSpec

FILE = "exits.safetensors"
ENTRY = "helios_exits"
VERSION = 1
REMEDY = "make heads for this model with `helios tune-exits`"
SHARED = "shared"
"""In a configuration, in place of a file: every layer may be an exit with the model's own final norm and LM head; or
those alone that are named after it, as in "shared:8,16"."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one model, by their exits' layers."""

    exits: tuple[Exit, ...]
    tensors: Mapping[str, TensorInfo]
    frequent: tuple[int, ...] = ()
    """The tokens that the model says most often, the most frequent first."""

    def at(self, layer: int, setting: str = "depth") -> Exit:
        """The exit after so many layers. Raises ConfigError naming those there are and the ``setting``."""
        for found in self.exits:
            if found.layer == layer:
                return found
        known = ", ".join(str(found.layer) for found in self.exits) or "none"
        raise ConfigError(f"{setting} is {layer}, where this model has no exit with a head; it has exits at {known}")

    def sources(self, checkpoint: Checkpoint, spec: ModelSpec, found: Exit) -> dict[str, str]:
        """Of a model that ends at an exit, the tensors that come from the heads: the name that the model's own
        checkpoint would give them, and that in ``tensors``."""
        return dict(_needed(Naming.of(checkpoint.names), spec, found).values())

    def by_source(self, checkpoint: Checkpoint, spec: ModelSpec, found: Exit) -> dict[str, str]:
        """Likewise, by the name of ``checkpoint.layout``."""
        needed = _needed(Naming.of(checkpoint.names), spec, found)
        return {source: own for source, (_, own) in needed.items()}


def shared_heads(setting: str, spec: ModelSpec) -> Heads:
    """Exits of a model that is trained to share its LM head with every layer (LayerSkip): after all of them but the
    last, or after those that ``setting`` names. Raises ConfigError for layers that are none or unsorted."""
    _, colon, named = setting.partition(":")
    layers = list(range(1, spec.n_layers))
    if colon:
        parts = named.split(",")
        chosen = [int(part) for part in parts if part.strip().isdecimal()]
        if len(chosen) < len(parts) or chosen != sorted(set(chosen) & set(layers)):
            raise ConfigError(
                f"exits is '{setting}'; name layers from 1 to {spec.n_layers - 1}, each deeper than the one before, "
                f"as in {SHARED}:1,2"
            )
        layers = chosen
    return Heads(tuple(Exit(layer) for layer in layers), {})


def is_shared(setting: str | None) -> bool:
    return setting is not None and setting.partition(":")[0] == SHARED


def read_heads(path: Path, checkpoint: Checkpoint, spec: ModelSpec) -> Heads:
    """The heads in a file. Raises CheckpointError for a file that is damaged, was made for another trunk, or lacks
    tensors of a head, has them in other shapes, or has others."""
    tensors = parse_file(path)
    content = _content(path)
    exits = _exits(path, content, spec)
    made_for, this = content.get("trunk"), fingerprint(checkpoint, spec)
    if made_for != this:
        raise CheckpointError(
            f"{path} has heads for another model (its trunk's fingerprint is {str(made_for)[:16]}, this one's is "
            f"{this[:16]}); {REMEDY}"
        )
    unused = dict(tensors)
    naming = Naming.of(checkpoint.names)
    for found in exits:
        for name, (_, source) in _needed(naming, spec, found).items():
            info = unused.pop(source, None)
            if info is None:
                raise CheckpointError(f"{path} lacks '{source}' of the exit at layer {found.layer}")
            if info.shape != _shape(spec, found, name):
                raise CheckpointError(
                    f"{path}: '{source}' has shape {list(info.shape)}; this model needs "
                    f"{list(_shape(spec, found, name))}"
                )
            if not info.dtype.is_floating_point:
                raise CheckpointError(f"{path}: '{source}' has type {info.dtype}; heads must be floating point")
    if unused:
        raise CheckpointError(f"{path} has '{next(iter(unused))}', which belongs to no exit that it lists")
    return Heads(exits, tensors, _frequent(path, content, spec))


def trunk_of(path: Path) -> str:
    """The fingerprint of the model that a file's heads were made for. Raises CheckpointError for a damaged file."""
    return str(_content(path).get("trunk"))


def describe(exits: Iterable[Exit], trunk: str, frequent: Iterable[int] = ()) -> dict[str, str]:
    """The metadata of a file with these heads."""
    listed = [{key: value for key, value in asdict(found).items() if value is not None} for found in exits]
    content = {"version": VERSION, "trunk": trunk, "exits": listed, "frequent": list(frequent)}
    return {"format": "pt", ENTRY: json.dumps(content)}


def fingerprint(checkpoint: Checkpoint, spec: ModelSpec) -> str:
    """Tells trunks apart: a hash of the shapes and of all norms rounded to bfloat16, which no quantisation touches."""
    naming = Naming.of(checkpoint.names)
    digest = hashlib.sha256(
        json.dumps([spec.architecture, spec.n_layers, spec.hidden_size, spec.mlp_size, spec.vocab_size]).encode()
    )
    groups = [attention_group(spec, layer) for layer in range(spec.n_layers)] + [head_group(spec)]
    for tensor in (tensor for group in groups for tensor in group if tensor.name == "norm.weight"):
        info = checkpoint.info(naming(tensor.parts[0].source))
        values = torch.empty(info.shape, dtype=torch.float32)
        read_into(info, values)
        digest.update(values.bfloat16().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _content(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(read_metadata(path)[ENTRY])
    except (KeyError, ValueError):
        raise CheckpointError(f"{path} has no '{ENTRY}' in its metadata; {REMEDY}") from None
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise CheckpointError(f"{path} is no file of heads of version {VERSION}; {REMEDY}")
    return content


def _exits(path: Path, content: Mapping[str, Any], spec: ModelSpec) -> tuple[Exit, ...]:
    listed = content.get("exits")
    if not isinstance(listed, list) or not listed:
        raise CheckpointError(f"{path} lists no exits")
    exits = tuple(_exit(path, entry, spec) for entry in listed)
    layers = [found.layer for found in exits]
    if layers != sorted(set(layers)):
        raise CheckpointError(f"{path} lists exits at layers {layers}; each must be deeper than the one before")
    return exits


def _frequent(path: Path, content: Mapping[str, Any], spec: ModelSpec) -> tuple[int, ...]:
    listed = content.get("frequent", [])
    if not isinstance(listed, list) or not all(type(token) is int and 0 <= token < spec.vocab_size for token in listed):
        raise CheckpointError(f"{path}: frequent is no list of tokens of this model, from 0 to {spec.vocab_size - 1}")
    return tuple(listed)


def _exit(path: Path, entry: Any, spec: ModelSpec) -> Exit:
    names = {field.name for field in fields(Exit)}
    if not isinstance(entry, dict) or "layer" not in entry or not set(entry) <= names:
        raise CheckpointError(f"{path}: an exit is {entry!r}; it must have a layer, and of {', '.join(sorted(names))}")
    found = Exit(**entry)
    if type(found.layer) is not int or not 1 <= found.layer < spec.n_layers:
        raise CheckpointError(
            f"{path}: an exit is at layer {found.layer!r}; this model has exits 1 to {spec.n_layers - 1}"
        )
    if found.kind not in EXIT_KINDS:
        raise CheckpointError(f"{path}: an exit is of kind {found.kind!r}; there are {', '.join(EXIT_KINDS)}")
    adapter = found.kind == "adapter"
    if type(found.adapter_size) is not int or (found.adapter_size > 0) != adapter:
        raise CheckpointError(f"{path}: the exit at layer {found.layer} has adapter_size {found.adapter_size!r}")
    for name in ("threshold", "margin_threshold"):
        threshold = getattr(found, name)
        if threshold is not None and not (is_number(threshold) and 0 <= threshold <= 1):
            raise CheckpointError(
                f"{path}: the exit at layer {found.layer} has {name} {threshold!r}; it must be 0 to 1"
            )
    return found


def _parts(spec: ModelSpec, found: Exit) -> Iterable[Part]:
    """The tensors of the cut model that its own checkpoint does not have."""
    cut = replace(spec.at(found), tied=True)  # the LM head is the model's own
    if found.kind == "shared":
        return []
    groups = [head_group(cut)]
    if found.kind == "block":
        groups += [attention_group(cut, found.layer), mlp_group(cut, found.layer)]
    return [part for group in groups for tensor in group for part in tensor.parts]


def _needed(naming: Naming, spec: ModelSpec, found: Exit) -> dict[str, tuple[str, str]]:
    """By the layout's source name: the checkpoint's name of a head's tensor, and the heads' own."""
    layer = f"layers.{found.layer}."
    needed = {}
    for part in _parts(spec, found):
        _, inner, rest = part.source.partition(layer)
        if inner:
            own = f"block.{rest}"
        else:
            own = part.source.removeprefix(ADAPTER) if part.source.startswith(ADAPTER) else f"norm.{_kind(part.source)}"
        needed[part.source] = (naming(part.source), f"exits.{found.layer}.{own}")
    return needed


def _kind(source: str) -> str:
    return source.rpartition(".")[2]


def _shape(spec: ModelSpec, found: Exit, source: str) -> tuple[int, ...]:
    return next(part.shape for part in _parts(spec, found) if part.source == source)
