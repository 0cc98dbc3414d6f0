"""Units of weight placement (embedding, attention and MLP of each layer, head) and how one lies in a slot.

The matrices of a unit may be anywhere. Its norms and biases, a few KiB, always stay where the model computes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .checkpoint.index import Checkpoint, TensorInfo
from .checkpoint.layout import FusedTensor, Group, Naming, attention_group, embedding_group, head_group, mlp_group
from .spec import ModelSpec
from .storage.direct import ALIGN, PIECE_BYTES, Bounce, SourceFile
from .storage.ring import Recipe

MATRICES = frozenset({"qkv.weight", "out.weight", "up.weight", "down.weight", "lm_head.weight"})
"""Engine tensors used by ``Device.linear`` alone."""
CONVERT = 32768
"""Elements converted at a time: torch converts more on several threads, which the computing ones need."""


class Unit(NamedTuple):
    """``number`` is that of the layer; of the head, of the piece of it."""

    kind: Literal["embedding", "attention", "mlp", "head"]
    number: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind in ("embedding", "head") else f"layers.{self.number}.{self.kind}"


def units(n_layers: int) -> list[Unit]:
    """All units of a model in the order in which a token visits them."""
    layers = [Unit(kind, layer) for layer in range(n_layers) for kind in ("attention", "mlp")]
    return [Unit("embedding"), *layers, Unit("head")]


def group_of(spec: ModelSpec, unit: Unit) -> Group:
    """The engine tensors of a unit."""
    if unit.kind == "attention":
        return attention_group(spec, unit.number)
    if unit.kind == "mlp":
        return mlp_group(spec, unit.number)
    return embedding_group(spec) if unit.kind == "embedding" else head_group(spec)


def matrix_bytes(spec: ModelSpec, unit: Unit, dtype: torch.dtype) -> int:
    """Bytes of what may be placed elsewhere: of the embedding its tables, of a tied head nothing."""
    group = group_of(spec, unit)
    chosen = group if unit.kind == "embedding" else [tensor for tensor in group if tensor.name in MATRICES]
    return sum(tensor.size for tensor in chosen) * dtype.itemsize


def small_bytes(spec: ModelSpec, unit: Unit, dtype: torch.dtype) -> int:
    """Bytes of a unit's norms and biases."""
    return sum(tensor.size for tensor in group_of(spec, unit)) * dtype.itemsize - matrix_bytes(spec, unit, dtype)


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """``count`` elements of a tensor in a file, to be put at byte ``at`` of a slot as ``dtype``."""

    file: SourceFile
    offset: int
    count: int
    stored: torch.dtype
    at: int
    dtype: torch.dtype

    def run(self, host: Tensor, bounce: Bounce) -> None:
        size = self.count * self.dtype.itemsize
        if self.stored == self.dtype:
            self.file.read(self.offset, host[self.at : self.at + size], bounce)
            return
        source = self.file.window(self.offset, self.count * self.stored.itemsize, bounce)
        if self.offset % self.stored.itemsize:  # a header that was not padded
            source = source.clone()
        into = host[self.at : self.at + size].view(self.dtype)
        values = source.view(self.stored)
        for start in range(0, self.count, CONVERT):
            into[start : start + CONVERT].copy_(values[start : start + CONVERT])


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor in a slot: ``shape`` and ``dtype`` at byte ``at``."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    at: int


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """How the matrices of a unit lie in a slot, and what to read where."""

    tensors: tuple[Placed, ...]
    recipe: Recipe

    @property
    def n_bytes(self) -> int:
        """Bytes of a slot that it takes."""
        return self.recipe.n_bytes

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors alone."""
        return sum(math.prod(placed.shape) * placed.dtype.itemsize for placed in self.tensors)

    def views(self, content: Tensor) -> dict[str, Tensor]:
        """The tensors, by name, as views of a filled slot's ``content``."""
        views = {}
        for placed in self.tensors:
            end = placed.at + math.prod(placed.shape) * placed.dtype.itemsize
            views[placed.name] = content[placed.at : end].view(placed.dtype).view(placed.shape)
        return views


class Layouts:
    """Makes layouts for one checkpoint, whose files it keeps open."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._largest = max(matrix_bytes(spec, Unit(kind), dtype) for kind in ("attention", "mlp")) // dtype.itemsize
        self._naming = Naming.of(checkpoint.names)
        self._dtype = dtype
        self._files: dict[Path, SourceFile] = {}

    def info(self, source: str) -> TensorInfo:
        """Where the tensor with that name of ``checkpoint.layout`` lies."""
        return self._checkpoint.info(self._naming(source))

    def file(self, info: TensorInfo) -> SourceFile:
        if info.file not in self._files:
            self._files[info.file] = SourceFile(info.file)
        return self._files[info.file]

    def of(self, tensors: Sequence[FusedTensor]) -> UnitLayout:
        """All of these tensors one behind the other, each as far from an aligned byte as its first part is on disk."""
        placed, pieces, cursor = [], [], 0
        for tensor in tensors:
            infos = [self.info(part.source) for part in tensor.parts]
            at = -(-cursor // ALIGN) * ALIGN + _phase(infos[0])
            placed.append(Placed(tensor.name, tensor.shape, self._dtype, at))
            width = tensor.size // tensor.shape[0] * self._dtype.itemsize
            for part, info in zip(tensor.parts, infos, strict=True):
                pieces += self._pieces(info, at + part.row * width)
            cursor = at + tensor.size * self._dtype.itemsize
        return self._layout(placed, pieces, cursor)

    def row_ranges(self, shape: tuple[int, ...]) -> list[range]:
        """The rows of a large table, cut into ranges no larger than the largest unit of a layer."""
        step = max(1, self._largest // shape[1])
        return [range(row, min(row + step, shape[0])) for row in range(0, shape[0], step)]

    def rows(self, name: str, info: TensorInfo, rows: range) -> UnitLayout:
        """Some rows of one checkpoint tensor."""
        width = info.nbytes // info.shape[0]
        part = TensorInfo(
            info.name,
            info.file,
            info.offset + rows.start * width,
            len(rows) * width,
            info.dtype,
            (len(rows), *info.shape[1:]),
        )
        at = _phase(part)
        size = math.prod(part.shape) * self._dtype.itemsize
        placed = [Placed(name, part.shape, self._dtype, at)]
        return self._layout(placed, self._pieces(part, at), at + size)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _layout(self, placed: list[Placed], pieces: list[ReadPiece], n_bytes: int) -> UnitLayout:
        files = tuple({piece.file.path: piece.file for piece in pieces}.values())
        return UnitLayout(tuple(placed), Recipe(n_bytes, tuple(pieces), files=files))

    def _pieces(self, info: TensorInfo, at: int) -> list[ReadPiece]:
        """Reads of at most PIECE_BYTES that begin at multiples of it in the file."""
        file, stored, offset, end = self.file(info), info.dtype, info.offset, info.offset + info.nbytes
        pieces = []
        while offset < end:
            stop = min(end, (offset // PIECE_BYTES + 1) * PIECE_BYTES)
            count = -(-(stop - offset) // stored.itemsize)  # up, where a header was not padded
            pieces.append(ReadPiece(file, offset, count, stored, at, self._dtype))
            offset, at = offset + count * stored.itemsize, at + count * self._dtype.itemsize
        return pieces


def _phase(info: TensorInfo) -> int:
    """How far from an aligned byte a tensor should lie to be read in place."""
    return info.offset % ALIGN if info.offset % 8 == 0 else 0
