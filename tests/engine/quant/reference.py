"""The paper's formula once more, in plain numpy on one group at a time, and the layouts of codes element by element."""

import itertools

import numpy as np
import torch

from engine.quant.groups import Quantised
from engine.quant.scheme import Scheme


def groups_of(shape: tuple[int, int], scheme: Scheme):
    """For every group: the indices of its elements [out, in], and the index of its scale."""
    rows, columns = shape
    size = scheme.group_size or (columns if scheme.dim == "input" else rows)
    along, across = (columns, rows) if scheme.dim == "input" else (rows, columns)
    for other, number in itertools.product(range(across), range(along // size)):
        span = range(number * size, (number + 1) * size)
        if scheme.dim == "input":
            yield [(other, i) for i in span], (other, number)
        else:
            yield [(i, other) for i in span], (number, other)


def quantise_group(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.float32, np.float32]:
    """Codes, scale and minimum of one group, in fp32."""
    levels = np.float32(2**bits - 1)
    low, high = values.min(), values.max()
    if low == high:
        return np.zeros(len(values)), np.float32(0), low
    return np.round((values - low) / (high - low) * levels), (high - low) / levels, low


def expected(
    x: torch.Tensor, scheme: Scheme, scale_dtype: torch.dtype = torch.float16
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and dequantised values of a matrix, [out, in] each."""
    values = x.float().numpy()
    codes, back = np.zeros(values.shape, dtype=np.uint8), np.zeros(values.shape, dtype=np.float32)
    for indices, _ in groups_of(values.shape, scheme):
        at = tuple(np.array(indices).T)
        codes[at], scale, low = quantise_group(values[at], scheme.bits)
        scale, low = (torch.tensor(number).to(scale_dtype).float().numpy() for number in (scale, low))
        back[at] = codes[at].astype(np.float32) * scale + low
    return codes, back


def code_at(q: Quantised, row: int, column: int) -> int:
    """The code of one element, by the layout that ``scheme`` documents."""
    if q.scheme.bits == 8:
        return int(q.codes[row, column]) + 128
    if q.scheme.dim == "input":
        block, within = divmod(row, 64)
        byte, high = int(q.codes[block, column, within % 32]), within >= 32
    else:
        size = q.scheme.group_size or q.shape[0]
        group, within = divmod(row, size)
        byte, high = int(q.codes[group * size // 2 + within % (size // 2), column]), within >= size // 2
    return byte >> 4 if high else byte & 15
