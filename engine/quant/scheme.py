"""How a weight matrix is quantised, as data: bits, group size, dimension, and the shapes that follow.

A matrix ``[out, in]`` has groups of ``group_size`` consecutive elements along its input or its output. Each group has a
scale and a minimum in a 16-bit float type; an element is ``code * scale + minimum``.

Layout of the codes. Four bits, two codes a byte, arranged so that expanding never has to interleave them:

- along the input: ``[ceil(out / 64), in, 32]``. Byte j of a block's column holds row j of the block in its low half and
  row 32 + j in its high half; rows beyond the last are 0. This is what torch's packed kernel reads with AVX-512.
- along the output: ``[out / 2, in]``. Of every group the first half of its rows is in the low halves of the bytes, the
  second half in the high ones.

Eight bits: int8 ``[out, in]``, the code less 128.

Stacking matrices below one another (query, key and value): along the output with whole groups in each, which ``check``
makes sure of, and along the input when each has a multiple of 64 rows or eight bits, the stack's codes, scales and
minima are those of the matrices one after another, and it can be used as one matrix. With other row counts it stays
several matrices, each of which fills its own rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ConfigError

Bits = Literal[4, 8]
Dim = Literal["input", "output"]
BLOCK_ROWS = 64
"""Rows of a block of four-bit codes with groups along the input."""
MAX_COLUMNS = 2**17
"""Columns that the expansion's workspace has room for."""
SCALE_BYTES = 2
GROUP_SIZE = 64
"""The paper's."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How matrices are quantised. Values are checked by ``validate``, not at construction."""

    bits: Bits = 4
    group_size: int | None = GROUP_SIZE
    """Elements of a group; None is the whole dimension, whatever its size."""
    dim: Dim = "input"
    """The dimension along which the elements of a group follow one another."""

    def validate(self) -> "Scheme":
        """Return self; raises ConfigError naming the field, its value and what is allowed."""
        if self.bits not in get_args(Bits):
            raise ConfigError(f"bits is {self.bits}; it must be 4 or 8")
        if self.dim not in get_args(Dim):
            raise ConfigError(f"dim is '{self.dim}'; it must be input or output")
        if self.group_size is not None and self.group_size < 2:
            raise ConfigError(f"group_size is {self.group_size}; it must be at least 2")
        return self

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def in_blocks(self) -> bool:
        """Whether the codes lie in blocks of 64 rows."""
        return self.bits == 4 and self.dim == "input"

    def group_of(self, shape: Sequence[int]) -> int:
        """Elements of a group of a matrix [out, in]."""
        return self.group_size or shape[1 if self.dim == "input" else 0]

    def check(self, shape: Sequence[int], name: str = "the matrix") -> None:
        """Raises ConfigError unless a matrix of this shape can be quantised so."""
        if len(shape) != 2 or 0 in shape:
            raise ConfigError(f"{name} has shape {list(shape)}; only matrices [out, in] are quantised in groups")
        size, group = shape[1 if self.dim == "input" else 0], self.group_of(shape)
        halves = 2 if self.bits == 4 and self.dim == "output" else 1
        if size % group or group % halves:
            fit = [n for n in (16, 32, 64, 128, 256) if size % n == 0]
            raise ConfigError(
                f"{name} has {size} elements along its {self.dim}, which do not make up "
                f"{'even ' if halves == 2 else ''}groups of {group}; choose a group size that divides {size}"
                + (f", such as {', '.join(map(str, fit))}" if fit else "")
                + ", or the other dimension"
            )
        if shape[1] > MAX_COLUMNS:
            raise ConfigError(f"{name} has {shape[1]} columns; matrices of up to {MAX_COLUMNS} are quantised")

    def codes_shape(self, shape: Sequence[int]) -> Shape:
        """Shape of the codes (one byte an item) of a matrix [out, in]."""
        rows, columns = shape
        if self.bits == 8:
            return rows, columns
        if self.dim == "output":
            return rows // 2, columns
        return -(-rows // BLOCK_ROWS), columns, BLOCK_ROWS // 2

    def scale_shape(self, shape: Sequence[int]) -> Shape:
        """Shape of the scales, and of the minima: the matrix's, with one element for each group."""
        rows, columns = shape
        group = self.group_of(shape)
        return (rows, columns // group) if self.dim == "input" else (rows // group, columns)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of codes, scales and minima of a matrix [out, in]."""
        return math.prod(self.codes_shape(shape)) + 2 * SCALE_BYTES * math.prod(self.scale_shape(shape))

    def describe(self) -> str:
        """In words: "4 bits, groups of 64 along the input"."""
        size = f"groups of {self.group_size}" if self.group_size else "one group"
        return f"{self.bits} bits, {size} along the {self.dim}"
