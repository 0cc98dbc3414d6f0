"""The stored tensors of a quantised copy: are they all there, and how do they become a fused matrix in memory."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..checkpoint.index import Checkpoint, TensorIndex, TensorInfo
from ..checkpoint.layout import (
    FusedTensor,
    Naming,
    all_groups,
    check,
    check_tensor,
    refuse_missing,
    refuse_unused,
)
from ..errors import CheckpointError
from ..spec import ModelSpec
from .format import Quantisation, stored_names
from .groups import Quantised
from .matrix import StoredMatrix
from .scheme import BLOCK_ROWS, Scheme, Shape

ALIGNMENT = 64
"""Codes, scales and minima of a fused matrix start at multiples of this."""


def check_model(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """``layout.check`` for any model directory, quantised or not. Raises CheckpointError as that does."""
    quantisation = Quantisation.of(checkpoint.directory)
    if quantisation is None:
        check(checkpoint, spec)
        return
    naming = Naming.of(checkpoint.names)
    plain: dict[str, Shape] = {}
    codes: dict[str, Shape] = {}
    for fused in (fused for group in all_groups(spec) for fused in group):
        shapes = codes if quantisation.covers(fused) else plain
        shapes.update({naming(part.source): part.shape for part in fused.parts})
    needed = set(plain).union(*map(stored_names, codes))
    refuse_missing(checkpoint, sorted(needed))
    refuse_unused(checkpoint, spec, needed)
    for name, shape in plain.items():
        check_tensor(checkpoint, name, shape)
    for name, shape in codes.items():
        _check_codes(checkpoint, name, shape, quantisation.scheme)


def _check_codes(checkpoint: Checkpoint, name: str, shape: Shape, scheme: Scheme) -> None:
    infos = [checkpoint.info(stored) for stored in stored_names(name)]
    scheme.check(shape, name)
    shapes = scheme.codes_shape(shape), scheme.scale_shape(shape), scheme.scale_shape(shape)
    types = {_codes_dtype(scheme)}, {torch.float16, torch.bfloat16}, {infos[1].dtype}
    for info, expected, allowed in zip(infos, shapes, types, strict=True):
        if info.shape != expected or info.dtype not in allowed:
            raise CheckpointError(
                f"{info.file}: tensor '{info.name}' is {info.dtype} of shape {list(info.shape)}; a matrix "
                f"{list(shape)} in {scheme.describe()} needs {' or '.join(map(str, allowed))} of {list(expected)}. "
                f"Make the copy again with `helios quantize`"
            )


def _codes_dtype(scheme: Scheme) -> torch.dtype:
    return torch.uint8 if scheme.bits == 4 else torch.int8


@dataclass(frozen=True, slots=True)
class FusedCodes:
    """A fused matrix of the engine in codes: which stored tensors fill it, and where they lie in a run of bytes.

    The codes of all parts one after another, then their scales, then their minima. Where the parts stack (``scheme``
    says when) they are one matrix, which a kernel can use, else several.
    """

    scheme: Scheme
    shapes: tuple[Shape, ...]
    """[out, in] of each part."""
    infos: tuple[tuple[TensorInfo, TensorInfo, TensorInfo], ...]
    """Codes, scale and minimum of each part in the file."""

    @classmethod
    def of(cls, checkpoint: TensorIndex, naming: Naming, fused: FusedTensor, scheme: Scheme) -> "FusedCodes":
        """Of an engine tensor that ``Quantisation.covers``. Raises CheckpointError for a tensor that is missing."""
        infos = []
        for part in fused.parts:
            codes, scale, minimum = map(checkpoint.info, stored_names(naming(part.source)))
            infos.append((codes, scale, minimum))
        return cls(scheme, tuple(part.shape for part in fused.parts), tuple(infos))

    @property
    def nbytes(self) -> int:
        """Bytes of memory it takes."""
        return self._offsets()[-1]

    @property
    def stacks(self) -> bool:
        """Whether the parts together are one matrix."""
        if len(self.shapes) == 1:
            return True
        if len({scale.dtype for _, scale, _ in self.infos}) > 1:
            return False
        if self.scheme.dim == "output":
            return self.scheme.group_size is not None
        return self.scheme.bits == 8 or all(rows % BLOCK_ROWS == 0 for rows, _ in self.shapes[:-1])

    def matrix(self, memory: Tensor) -> StoredMatrix:
        """The matrix over ``memory`` (uint8, ``nbytes`` of it, its storage offset a multiple of 64), as views."""
        if not self.stacks:
            return StoredMatrix(self._parts(memory))
        shape = (sum(rows for rows, _ in self.shapes), self.shapes[0][1])
        starts = self._offsets()
        scales = self.scheme.scale_shape(shape)
        wide = self.infos[0][1].dtype
        return StoredMatrix(
            (
                Quantised(
                    _carve(memory, starts[0], self.scheme.codes_shape(shape), _codes_dtype(self.scheme)),
                    _carve(memory, starts[1], scales, wide),
                    _carve(memory, starts[2], scales, wide),
                    shape,
                    self.scheme,
                ),
            )
        )

    def places(self) -> list[tuple[TensorInfo, int]]:
        """The stored tensors, and the byte of the memory each of them begins at."""
        at, places = self._offsets(), []
        for infos in self.infos:
            places += [(info, at[kind]) for kind, info in enumerate(infos)]
            at = [at[kind] + info.nbytes for kind, info in enumerate(infos)]
        return places

    def _offsets(self) -> list[int]:
        """Where codes, scales and minima begin, and the end."""
        starts = [0]
        for kind in range(3):
            end = starts[-1] + sum(infos[kind].nbytes for infos in self.infos)
            starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        return starts

    def _parts(self, memory: Tensor) -> list[Quantised]:
        at = self._offsets()
        parts = []
        for shape, infos in zip(self.shapes, self.infos, strict=True):
            views = [_carve(memory, at[kind], info.shape, info.dtype) for kind, info in enumerate(infos)]
            at = [at[kind] + info.nbytes for kind, info in enumerate(infos)]
            parts.append(Quantised(views[0], views[1], views[2], shape, self.scheme))
        return parts


def _carve(memory: Tensor, start: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    return memory[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
