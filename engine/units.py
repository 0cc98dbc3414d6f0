"""Units of weight placement (embedding, attention and MLP of each layer, head) and how one lies in a slot.

The matrices of a unit may be anywhere. Its norms and biases, a few KiB, always stay where the model computes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .checkpoint.index import TensorIndex, TensorInfo
from .checkpoint.layout import FusedTensor, Group, Naming, attention_group, embedding_group, head_group, mlp_group
from .quant.format import Quantisation
from .quant.matrix import StoredMatrix
from .quant.stored import ALIGNMENT, FusedCodes
from .spec import ModelSpec
from .storage.direct import ALIGN, PIECE_BYTES, Bounce, SourceFile
from .storage.storage import Storage
from .storage.transfer import Recipe

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


def is_matrix(unit: Unit, name: str) -> bool:
    """Whether a tensor of the unit's group may be placed elsewhere; the others are its norms and biases."""
    return unit.kind == "embedding" or name in MATRICES


def held_bytes(spec: ModelSpec, unit: Unit, dtype: torch.dtype, quantisation: Quantisation | None) -> int:
    """Bytes of a unit's matrices as they are held: in the compute dtype, or in codes."""
    matrices = [tensor for tensor in group_of(spec, unit) if is_matrix(unit, tensor.name)]
    if quantisation:
        return sum(quantisation.nbytes(tensor, dtype.itemsize) for tensor in matrices)
    return sum(tensor.size for tensor in matrices) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """``count`` elements of a tensor in a file, to be put at byte ``at`` of a slot as ``dtype``."""

    file: SourceFile
    offset: int
    count: int
    stored: torch.dtype
    at: int
    dtype: torch.dtype

    @property
    def place(self) -> SourceFile:
        return self.file

    @property
    def n_bytes(self) -> int:
        """Bytes read."""
        return self.count * self.stored.itemsize

    def run(self, host: Tensor, bounce: Bounce) -> None:
        size = self.count * self.dtype.itemsize
        if self.stored == self.dtype:
            self.file.read(self.offset, host[self.at : self.at + size], bounce)
            return
        source = self.file.window(self.offset, self.n_bytes, bounce)
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

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, content: Tensor) -> Tensor:
        return content[self.at : self.at + self.n_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class PlacedCodes:
    """A quantised matrix in a slot at byte ``at``."""

    name: str
    codes: FusedCodes
    at: int

    @property
    def n_bytes(self) -> int:
        return self.codes.nbytes

    def view(self, content: Tensor) -> StoredMatrix:
        return self.codes.matrix(content[self.at : self.at + self.n_bytes])


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """How the matrices of a unit lie in a slot, and what to read where."""

    tensors: tuple[Placed | PlacedCodes, ...]
    recipe: Recipe

    @property
    def n_bytes(self) -> int:
        """Bytes of a slot that it takes."""
        return self.recipe.n_bytes

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors alone."""
        return sum(placed.n_bytes for placed in self.tensors)

    def views(self, content: Tensor) -> dict[str, Tensor | StoredMatrix]:
        """The tensors, by name, as views of a filled slot's ``content``."""
        return {placed.name: placed.view(content) for placed in self.tensors}


class Layouts:
    """Makes layouts for one checkpoint, whose files it keeps open."""

    def __init__(
        self,
        checkpoint: TensorIndex,
        spec: ModelSpec,
        dtype: torch.dtype,
        quantisation: Quantisation | None,
        storage: Storage,
    ) -> None:
        """``dtype`` is the compute dtype, ``quantisation`` the checkpoint's; ``storage`` opens its files."""
        self._checkpoint = checkpoint
        self._storage = storage
        self._naming = Naming.of(checkpoint.names)
        self._dtype = dtype
        self._files: dict[Path, SourceFile] = {}
        self.quantisation = quantisation
        self._largest = max(held_bytes(spec, Unit(kind), dtype, self.quantisation) for kind in ("attention", "mlp"))

    def info(self, source: str) -> TensorInfo:
        """Where the tensor with that name of ``checkpoint.layout`` lies."""
        return self._checkpoint.info(self._naming(source))

    def file(self, info: TensorInfo) -> SourceFile:
        if info.file not in self._files:
            self._files[info.file] = self._storage.source(info.file)
        return self._files[info.file]

    def of(self, tensors: Sequence[FusedTensor]) -> UnitLayout:
        """All of these tensors one behind the other, each as far from an aligned byte as its first part is on disk."""
        placed: list[Placed | PlacedCodes] = []
        pieces: list[ReadPiece] = []
        cursor = 0
        for tensor in tensors:
            start = -(-cursor // ALIGN) * ALIGN
            if self.quantisation and self.quantisation.covers(tensor):
                codes = FusedCodes.of(self._checkpoint, self._naming, tensor, self.quantisation.scheme)
                start += _phase(codes.infos[0][0], ALIGNMENT)
                placed.append(PlacedCodes(tensor.name, codes, start))
                for info, at in codes.places():
                    pieces += self._pieces(info, start + at, info.dtype)
            else:
                infos = [self.info(part.source) for part in tensor.parts]
                start += _phase(infos[0], self._dtype.itemsize)
                placed.append(Placed(tensor.name, tensor.shape, self._dtype, start))
                width = tensor.size // tensor.shape[0] * self._dtype.itemsize
                for part, info in zip(tensor.parts, infos, strict=True):
                    pieces += self._pieces(info, start + part.row * width, self._dtype)
            cursor = start + placed[-1].n_bytes
        return self._layout(placed, pieces, cursor)

    def row_ranges(self, shape: tuple[int, ...]) -> list[range]:
        """The rows of a large table, cut into ranges no larger than the largest unit of a layer."""
        step = max(1, self._largest // (shape[1] * self._dtype.itemsize))
        return [range(row, min(row + step, shape[0])) for row in range(0, shape[0], step)]

    def rows(self, name: str, info: TensorInfo, rows: range) -> UnitLayout:
        """Some rows of one checkpoint tensor, which is not in codes."""
        width = info.nbytes // info.shape[0]
        part = replace(
            info,
            offset=info.offset + rows.start * width,
            nbytes=len(rows) * width,
            shape=(len(rows), *info.shape[1:]),
        )
        placed = Placed(name, part.shape, self._dtype, _phase(part, self._dtype.itemsize))
        pieces = self._pieces(part, placed.at, self._dtype)
        return self._layout([placed], pieces, placed.at + placed.n_bytes)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _layout(self, placed: list[Placed | PlacedCodes], pieces: list[ReadPiece], n_bytes: int) -> UnitLayout:
        files = tuple({piece.file.path: piece.file for piece in pieces}.values())
        return UnitLayout(tuple(placed), Recipe(n_bytes, tuple(pieces), files=files))

    def _pieces(self, info: TensorInfo, at: int, dtype: torch.dtype) -> list[ReadPiece]:
        """Reads of at most PIECE_BYTES that begin at multiples of it in the file."""
        file, stored, offset, end = self.file(info), info.dtype, info.offset, info.offset + info.nbytes
        pieces = []
        while offset < end:
            stop = min(end, (offset // PIECE_BYTES + 1) * PIECE_BYTES)
            count = -(-(stop - offset) // stored.itemsize)  # up, where a header was not padded
            pieces.append(ReadPiece(file, offset, count, stored, at, dtype))
            offset, at = offset + count * stored.itemsize, at + count * dtype.itemsize
        return pieces


def _phase(info: TensorInfo, alignment: int) -> int:
    """How far from an aligned byte a tensor should lie to be read in place; 0 if it may not lie there."""
    return info.offset % ALIGN if info.offset % max(alignment, 8) == 0 else 0
