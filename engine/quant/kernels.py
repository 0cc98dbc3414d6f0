"""torch's products by packed codes on a CPU, and whether they read the layouts of ``scheme`` on this machine.

Both are written by hand for bf16 activations; for fp32 and fp16 they exist, but take 25 to 200 times as long as a
product by expanded weights.
"""

import functools
from typing import cast

import torch
from torch import Tensor

from .groups import dequantise, quantise
from .scheme import BLOCK_ROWS, Scheme

INT4_GROUPS = (32, 64, 128, 256)
INT4_ZERO = 8
"""The int4 kernel's element is ``(code - 8) * scale + zero``."""
INT8_COLUMNS = 16
"""The int8 kernel runs over the end of memory unless this divides the columns."""
_TOLERANCE = 0.02
"""Of a product's largest element; scales and results in bf16 are off by 0.005."""


def int4_product(rows: Tensor, codes: Tensor, group: int, scale_and_zero: Tensor) -> Tensor:
    """rows [R, in] bf16 times codes [out / 64, in, 32] transposed: [R, out] bf16.

    ``scale_and_zero`` is bf16 [in / group, out, 2]. The number of rows ``out`` is a multiple of 64.
    """
    packed = codes.view(-1, rows.shape[1] // 2)  # the shape that the operator checks; it reads the bytes as they lie
    return cast(Tensor, torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, group, scale_and_zero))


def int8_product(rows: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """rows [R, in] bf16 times int8 codes [out, in] transposed, times scale [out] bf16: [R, out] bf16."""
    return cast(Tensor, torch.ops.aten._weight_int8pack_mm(rows, codes, scale))


def scale_and_zero(scale: Tensor, minimum: Tensor, out: Tensor | None = None) -> Tensor:
    """The int4 kernel's form of scale and minimum [out, groups]: bf16 [groups, out, 2], into ``out`` if given."""
    if out is None:
        out = torch.empty((scale.shape[1], scale.shape[0], 2), dtype=torch.bfloat16, device=scale.device)
    wide = scale.t().float()
    out[..., 0].copy_(wide)
    out[..., 1].copy_(wide.mul_(INT4_ZERO).add_(minimum.t()))
    return out


@functools.cache
def int4_kernel_fits() -> bool:
    """Whether the int4 kernel of this machine reads our blocks: tried on a small matrix, by bytes and by product.

    It does with AVX-512; other instruction sets have blocks of other heights.
    """
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (2 * BLOCK_ROWS, BLOCK_ROWS), generator=generator)
    # Every group has both ends of the range, so that the codes come out as they went in.
    codes[:, ::32], codes[:, 1::32] = 0, 15
    q = quantise(codes.float(), Scheme(bits=4, group_size=32, dim="input"))
    rows = torch.randn((2, BLOCK_ROWS), generator=generator).bfloat16()
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        product = int4_product(rows, q.codes, 32, scale_and_zero(q.scale, q.minimum))
    except (RuntimeError, AttributeError):  # no such operator in this build of torch
        return False
    expected = rows.float() @ dequantise(q).t()
    close = (product.float() - expected).abs().max() <= _TOLERANCE * expected.abs().max()
    return packed.numel() == q.codes.numel() and torch.equal(packed.reshape(-1), q.codes.reshape(-1)) and bool(close)
