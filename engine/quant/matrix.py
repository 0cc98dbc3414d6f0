"""Weight matrices held in codes, for products ``rows @ W.T + bias``.

Few rows are multiplied by the codes themselves where torch has a kernel for it, many by the matrix expanded into a
buffer of the caller's. Four-bit codes along the input lie in memory, and in the file, as the kernel reads them, so
there is one copy of the codes for both, and a matrix streamed from a disk can use the kernel too: only its scales are
rewritten, an eighth of the codes' bytes at groups of 64.

    matrix = StoredMatrix((quantised,))          # views of a slot that a layer was read into, nothing is copied
    if matrix.packable(dtype):
        matrix = matrix.pack()                   # shares the codes; the scales are made anew
    y = matrix.linear(rows, bias, buffer)        # chooses by the number of rows
    weight = matrix.expand(buffer)               # or: expand once, multiply many times, by F.linear
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .expand import Workspace, expand_blocks
from .groups import Quantised, dequantise
from .kernels import (
    INT4_GROUPS,
    INT4_ZERO,
    INT8_COLUMNS,
    int4_kernel_fits,
    int4_product,
    int8_product,
    scale_and_zero,
)
from .scheme import BLOCK_ROWS

KERNEL_ROWS = 64
"""Rows up to which a packed kernel is faster than expanding the matrix for this product alone. Matrix 1536 x 576, one
Zen 5 core, us: the int4 kernel takes 25 / 82 / 320 / 636 / 797 for 1 / 8 / 32 / 64 / 80 rows, expanding and multiplying
418 / 438 / 523 / 625 / 683, of which expanding is 345. With an expanded matrix at hand it wins from 8 rows."""
INT8_ZERO = 128


class QuantisedMatrix(ABC):
    """A weight matrix [out, in] in codes."""

    shape: tuple[int, int]
    nbytes: int
    """Of all that it holds."""

    @abstractmethod
    def expand(self, buffer: Tensor, workspace: Workspace | None = None) -> Tensor:
        """The matrix [out, in] in the type of ``buffer``, a view of its first out * in elements.

        ``buffer`` is one-dimensional and contiguous. The view is contiguous or the transpose of a contiguous [in, out],
        whichever the codes expand to faster. Works in ``workspace``, one of WORKSPACE_BYTES is made if it is not given.
        """

    def linear(self, rows: Tensor, bias: Tensor | None, buffer: Tensor, workspace: Workspace | None = None) -> Tensor:
        """rows [R, in] times the matrix transposed, plus bias [out]: [R, out]. ``buffer`` is as for ``expand``."""
        return F.linear(rows, self.expand(buffer, workspace), bias)


class StoredMatrix(QuantisedMatrix):
    """A matrix over the stored tensors of one or several matrices below one another. Copies nothing."""

    def __init__(self, parts: Sequence[Quantised]) -> None:
        """The parts have one scheme and equal columns."""
        self.parts = tuple(parts)
        self.shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        self.nbytes = sum(part.nbytes for part in parts)

    def expand(self, buffer: Tensor, workspace: Workspace | None = None) -> Tensor:
        weight = _view(buffer, self.shape, transposed=self.parts[0].scheme.in_blocks)
        workspace = workspace or Workspace()
        row = 0
        for part in self.parts:
            dequantise(part, weight[row : row + part.shape[0]], workspace=workspace)
            row += part.shape[0]
        return weight

    def packable(self, dtype: torch.dtype) -> bool:
        """Whether torch has a fast kernel for these codes and activations of ``dtype`` on this machine."""
        scheme, (rows, columns) = self.parts[0].scheme, self.shape
        if self.parts[0].codes.is_cuda or dtype != torch.bfloat16 or len(self.parts) > 1 or scheme.dim == "output":
            return False
        if scheme.bits == 8:
            return scheme.group_of(self.shape) == columns and columns % INT8_COLUMNS == 0
        return scheme.group_of(self.shape) in INT4_GROUPS and rows % BLOCK_ROWS == 0 and int4_kernel_fits()

    def pack(self, scales: Tensor | None = None) -> "PackedMatrix":
        """The same matrix for the kernel, sharing the codes; scales and minima of this one are not used any more.

        ``scales`` is memory for four-bit scales: bf16 [in / group, out, 2], as many bytes as scales and minima have.
        Raises ValueError unless ``packable``.
        """
        if not self.packable(torch.bfloat16):
            raise ValueError(f"torch has no kernel for a matrix {list(self.shape)} in {self.parts[0].scheme}")
        return Int8Matrix(self.parts[0]) if self.parts[0].scheme.bits == 8 else Int4Matrix(self.parts[0], scales)


class PackedMatrix(QuantisedMatrix):
    """A matrix that a kernel multiplies by without expanding it."""

    @abstractmethod
    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """As ``linear``, by the kernel."""

    def linear(self, rows: Tensor, bias: Tensor | None, buffer: Tensor, workspace: Workspace | None = None) -> Tensor:
        if len(rows) > KERNEL_ROWS:
            return super().linear(rows, bias, buffer, workspace)
        return self.product(rows, bias)


class Int4Matrix(PackedMatrix):
    """Four bits, groups along the input. Scales and zeros are bf16, for the kernel and the expansion alike."""

    def __init__(self, q: Quantised, scales: Tensor | None = None) -> None:
        self.shape = (q.shape[0], q.shape[1])
        self._codes = q.codes
        self._group = q.scheme.group_of(q.shape)
        self._scales = scale_and_zero(q.scale, q.minimum, scales)
        self.nbytes = self._codes.nbytes + self._scales.nbytes

    def expand(self, buffer: Tensor, workspace: Workspace | None = None) -> Tensor:
        weight = _view(buffer, self.shape, transposed=True)
        expand_blocks(self._codes, self._scales_of, self._group, weight, workspace or Workspace())
        return weight

    def _scales_of(self, rows: slice, groups: slice) -> tuple[Tensor, Tensor]:
        scale, zero = (self._scales[groups, rows, i].float() for i in (0, 1))
        return scale, zero.sub_(scale, alpha=INT4_ZERO)

    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        product = int4_product(rows, self._codes, self._group, self._scales)
        return product if bias is None else product.add_(bias)


class Int8Matrix(PackedMatrix):
    """Eight bits, one group a row: ``(c * scale + offset) @ x`` is the kernel's ``c @ x * scale`` + offset * sum(x)."""

    def __init__(self, q: Quantised) -> None:
        self.shape = (q.shape[0], q.shape[1])
        self._stored = q
        wide = q.scale.float()
        self._scale = wide.bfloat16().view(-1)
        self._offset = (q.minimum.float() + INT8_ZERO * wide).bfloat16().view(-1)
        self.nbytes = q.nbytes + self._scale.nbytes + self._offset.nbytes

    def expand(self, buffer: Tensor, workspace: Workspace | None = None) -> Tensor:
        return dequantise(self._stored, _view(buffer, self.shape, transposed=False), workspace=workspace)

    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        product = int8_product(rows, self._stored.codes, self._scale)
        product.addcmul_(rows.sum(-1, keepdim=True), self._offset)
        return product if bias is None else product.add_(bias)


def _view(buffer: Tensor, shape: tuple[int, int], transposed: bool) -> Tensor:
    rows, columns = shape
    if buffer.numel() < rows * columns:
        raise ValueError(f"a buffer of {buffer.numel()} elements cannot hold a matrix {list(shape)}")
    flat = buffer[: rows * columns]
    return flat.view(columns, rows).t() if transposed else flat.view(rows, columns)
