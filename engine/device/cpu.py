"""The CPU as the device that runs the model."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..memory import available_bytes, page_aligned, total_bytes, trim
from ..quant.matrix import PackedMatrix
from ..weights import Matrix
from .base import Device

FUSED_ATTENTION_ELEMENTS = 130_000
"""Elements of K up to which torch's fused attention decodes faster on a CPU than two batched products do. It works
through one head at a time: 2.4 times as slow for 32 sequences of 160 positions and 3 KV heads, 8 times for 8 sequences
with 32 KV heads (bf16, two threads)."""

QUERY_ROWS = 128
"""Positions of a chunk that attend together on a CPU, each block of them only to the keys that its last one sees."""
KERNELS = 16
"""Kernels oneDNN keeps, of which each number of rows takes five: it would keep 1024, at about one MiB each."""
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    # Read once, when the process makes its first product, which must come after this.
    os.environ.setdefault(_cache, str(KERNELS))
LIBRARY_BYTES = 32 * 2**20
"""Kernels, packing buffers and free memory between blocks in use, as measured by tests/engine/peak.py."""
SCORES = 2**23
"""Attention scores that a block of a chunk may take; a long context makes the blocks smaller, down to 16 positions."""


class CpuDevice(Device):
    """The host: compute on ``threads`` threads of this process."""

    def __init__(self, dtype: torch.dtype, threads: int) -> None:
        self.torch_device = torch.device("cpu")
        self.dtype = dtype
        torch.set_num_threads(threads)
        packable = dtype == torch.float32 or (dtype == torch.bfloat16 and cpu_multiplies_bf16())
        self._packs = packable and torch._C._has_mkldnn
        self._gemv = dtype == torch.bfloat16

    @property
    def host(self) -> Device:
        return self

    def index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values)

    def to_host(self, values: Tensor) -> Tensor:
        return values

    def from_host(self, values: Tensor) -> Tensor:
        return values

    def linear(self, rows: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, PackedMatrix):
            return weight.product(rows, bias)
        if weight.is_mkldnn:
            return cast(Tensor, torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], ""))
        if not self._gemv or rows.shape[0] > 1:
            return F.linear(rows, weight, bias)
        # For one row torch's own product streams plain bf16 weights faster than oneDNN's, which is told apart only by
        # this switch (70 ns). Another thread's product that falls between is right as well.
        torch._C._set_mkldnn_enabled(False)
        try:
            return F.linear(rows, weight, bias)
        finally:
            torch._C._set_mkldnn_enabled(True)

    def decode_attention(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        b, n_kv, group, d = query.shape
        if group > 1 and keys.numel() <= FUSED_ATTENTION_ELEMENTS:
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        length = keys.shape[2]
        keys, values = keys.view(-1, length, d), values.view(-1, length, d)
        bias = query.new_zeros(()) if mask is None else mask.expand(b, n_kv, 1, length).reshape(-1, 1, length)
        scores = torch.baddbmm(bias, query.reshape(-1, group, d), keys.transpose(1, 2), alpha=d**-0.5)
        return torch.bmm(scores.softmax(-1), values).view(b, n_kv, group, d)

    def chunk_attention(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, start: int) -> Tensor:
        # Two batched products for a block of positions: torch's fused attention is 1.8 to 4 times as slow on a CPU.
        n_kv, group, s, d = query.shape
        rows = query_rows(n_kv * group, start + s)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for first in range(0, s, rows):
            last = min(first + rows, s)
            seen, count = start + last, last - first
            if mask is None:
                bias = query.new_full((count, seen), float("-inf")).triu_(first + 1)
            else:
                bias = mask[first:last, :seen]
            block = query[:, :, first:last].reshape(n_kv, group * count, d)
            scores = torch.baddbmm(bias.repeat(group, 1)[None], block, keys[:, :seen].transpose(1, 2), alpha=d**-0.5)
            attended = torch.bmm(torch.softmax(scores, -1), values[:, :seen])
            out[:, :, first:last] = attended.view(n_kv, group, count, d)
        return out

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return page_aligned(shape, dtype)

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return page_aligned(shape, dtype)

    def keep_matrix(self, matrix: Tensor) -> Tensor:
        # oneDNN's blocked layout. With plain weights every product reorders them again: 1.2 (512 rows) to 2 times
        # (1 and 8 rows) as slow in bf16, over 2 times in fp32.
        return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(matrix, None)) if self._packs else matrix.clone()

    def open_slot(self, n_bytes: int) -> "HostSlot":
        return HostSlot(page_aligned((n_bytes,), torch.uint8))

    @property
    def fast_dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float32) if cpu_multiplies_bf16() else (torch.float32,)

    @property
    def library_bytes(self) -> int:
        return LIBRARY_BYTES

    def trim(self) -> None:
        trim()

    def available_bytes(self) -> int:
        return available_bytes()

    def total_bytes(self) -> int:
        return total_bytes()

    def synchronize(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class HostSlot:
    """What a reader writes is at once where the model computes."""

    host: Tensor

    @property
    def content(self) -> Tensor:
        return self.host

    def begin(self) -> None:
        return

    def upload(self, n_bytes: int, source: Tensor | None = None) -> None:
        if source is not None:  # by numpy, which copies on this thread alone and without the interpreter lock
            np.copyto(self.host[:n_bytes].numpy(), source[:n_bytes].numpy())

    def download(self, at: int, n_bytes: int) -> None:
        return

    def wait(self) -> None:
        return

    def retire(self) -> None:
        return


def query_rows(n_heads: int, length: int) -> int:
    """Positions of a chunk that attend together on a CPU, when its last one sees ``length`` positions."""
    return max(16, min(QUERY_ROWS, SCORES // (n_heads * length)))


def usable_cores() -> int:
    """Cores the scheduler lets this process run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_multiplies_bf16() -> bool:
    """Whether bf16 products run in hardware; without it oneDNN emulates them, up to 200 times slower than fp32."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16 "))
