"""The numbers: group-wise asymmetric quantisation of a weight matrix, and back.

``q = round((x - min) / (max - min) * (2^b - 1))`` for each group, in fp32, halves to even; the scale
``(max - min) / (2^b - 1)`` and the minimum are rounded to fp16. A group of equal elements has codes and scale 0. Where
a scale or minimum is too large for fp16 (beyond 65504, which bf16 weights can hold), all scales and minima of the
matrix are bf16. Back: ``float(q) * float(scale) + float(minimum)`` in fp32, each operation rounded, then rounded to the
type asked for.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CheckpointError
from .expand import Workspace, as_floats, expand_blocks, expand_bytes, expand_halves
from .scheme import BLOCK_ROWS, Scheme, Shape


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix [out, in] in codes. The tensors may be views of memory that a layer is read into."""

    codes: Tensor
    """uint8 for four bits, int8 for eight, in ``scheme.codes_shape``."""
    scale: Tensor
    """fp16 or bf16, in ``scheme.scale_shape``."""
    minimum: Tensor
    shape: Shape
    scheme: Scheme

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + self.minimum.nbytes


def quantise(x: Tensor, scheme: Scheme, name: str = "the matrix") -> Quantised:
    """Quantise a floating-point matrix [out, in]. Takes about 16 bytes an element while it runs.

    Raises ConfigError if groups do not divide the matrix, CheckpointError for values that are not finite or spread too
    widely; ``name`` stands in the message.
    """
    codes, scale, minimum = encode(x, scheme, name)
    return Quantised(codes, *in_16_bits(scale, minimum), tuple(x.shape), scheme)


def encode(x: Tensor, scheme: Scheme, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """As ``quantise``: the packed codes, and scales and minima still in fp32."""
    scheme.check(x.shape, name)
    axis = 2 if scheme.dim == "input" else 1  # within [out, groups, group] or [groups, group, in]
    values = torch.unflatten(x.float(), axis - 1, (-1, scheme.group_of(x.shape)))
    low, high = values.amin(axis, keepdim=True), values.amax(axis, keepdim=True)  # aminmax is much slower
    width = high - low
    if not bool(torch.isfinite(width).all()):
        raise CheckpointError(f"{name} has values that are not finite, or too far apart for fp32; it is damaged")
    codes = (values - low).div_(torch.where(width == 0, 1.0, width)).mul_(scheme.levels).round_()
    packed = _pack(codes.to(torch.uint8).view(x.shape), scheme)
    return packed, width.squeeze(axis) / scheme.levels, low.squeeze(axis)


def in_16_bits(scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor]:
    """Both in fp16, or if that cannot hold them in bf16, whose range is that of fp32."""
    halves = scale.half(), minimum.half()
    if all(bool(torch.isfinite(half).all()) for half in halves):
        return halves
    return scale.bfloat16(), minimum.bfloat16()


def _pack(codes: Tensor, scheme: Scheme) -> Tensor:
    """Codes [out, in], one a byte, in the scheme's layout."""
    rows, columns = codes.shape
    if scheme.bits == 8:
        return (codes ^ 128).view(torch.int8)
    if scheme.dim == "output":
        halves = codes.view(-1, 2, scheme.group_of(codes.shape) // 2, columns)
        return (halves[:, 0] | halves[:, 1] << 4).view(-1, columns)
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -rows % BLOCK_ROWS)).view(-1, 2, BLOCK_ROWS // 2, columns)
    return (padded[:, 0] | padded[:, 1] << 4).transpose(1, 2).contiguous()


def dequantise(
    q: Quantised, out: Tensor | None = None, dtype: torch.dtype | None = None, workspace: Workspace | None = None
) -> Tensor:
    """The matrix [out, in] of ``dtype`` (fp32 if not said), or written into ``out``, whose type counts then.

    ``out`` may have any strides. Four bits along the input are fastest into the transpose of a contiguous [in, out],
    all others into a contiguous [out, in]. Beside ``out`` it takes a workspace of WORKSPACE_BYTES (one is made if none
    is given) and 8 bytes for each group of the 2^20 elements in work. Raises ValueError if ``out`` does not fit.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=dtype or torch.float32)
    elif tuple(out.shape) != q.shape or dtype not in (None, out.dtype):
        raise ValueError(f"a matrix {list(q.shape)} of {dtype} was asked for in {list(out.shape)} of {out.dtype}")
    workspace = workspace or Workspace()
    group = q.scheme.group_of(q.shape)
    if q.scheme.bits == 8:
        expand_bytes(q.codes, q.scale, q.minimum, q.scheme.dim == "input", group, out, workspace)
    elif q.scheme.dim == "output":
        expand_halves(q.codes, q.scale, q.minimum, group, out, workspace)
    else:
        expand_blocks(q.codes, lambda rows, groups: _scales(q, rows, groups), group, out, workspace)
    return out


def _scales(q: Quantised, rows: slice, groups: slice) -> tuple[Tensor, Tensor]:
    """Scales and minima of some groups of some rows, in fp32: each [groups, rows]."""
    return as_floats(q.scale[rows, groups].t()), as_floats(q.minimum[rows, groups].t())
