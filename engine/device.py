"""The one place that knows which device runs the model. Everything else works on a ``Device``.

A CPU and a CUDA device differ in where tensors live, how index tensors get there, which dtype is fast, how much
memory there is, and how a checkpoint's bytes reach a tensor.
"""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from .config import EngineConfig
from .errors import ConfigError

FUSED_ATTENTION_ELEMENTS = 130_000
"""Elements of K up to which torch's fused attention decodes faster on a CPU than two batched products do. It works
through one head at a time: 2.4 times as slow for 32 sequences of 160 positions and 3 KV heads, 8 times for 8 sequences
with 32 KV heads (bf16, two threads)."""

QUERY_ROWS = 128
"""Positions of a chunk that attend together on a CPU, each block of them only to the keys that its last one sees."""
SCORES = 2**23
"""Attention scores that a block of a chunk may take; a long context makes the blocks smaller, down to 16 positions."""

log = logging.getLogger(__name__)


class Device(ABC):
    """Where the model runs. ``torch_device`` is where its tensors live, ``dtype`` the type it computes in."""

    torch_device: torch.device
    dtype: torch.dtype

    @abstractmethod
    def index(self, values: np.ndarray) -> Tensor:
        """A small integer array as a tensor on the device; the copy overlaps with compute where it can."""

    @abstractmethod
    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """rows [R, in] times weight [out, in] transposed, plus bias [out]: [R, out]."""

    @abstractmethod
    def decode_attention(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of one position each of B sequences: [B, n_kv, group, d], as ``query``.

        ``keys`` and ``values`` are contiguous [B, n_kv, T, d], ``mask`` additive [B, 1, 1, T] or None.
        """

    @abstractmethod
    def chunk_attention(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, start: int) -> Tensor:
        """Causal attention of consecutive positions of one sequence: [n_kv, group, S, d], as ``query``.

        ``keys`` and ``values`` are [n_kv, T, d]; the first position of the chunk is key number ``start``, and keys
        after its last may hold anything finite. ``mask`` is additive [S, T]; None is causal with start = 0, T = S.
        """

    @abstractmethod
    def host_empty(self, shape: Sequence[int]) -> Tensor:
        """Uninitialised host memory of ``dtype`` to read a file into, for ``place`` or ``place_matrix``."""

    @abstractmethod
    def place(self, host: Tensor) -> Tensor:
        """A tensor of ``host_empty``, filled, where the model computes. ``host`` may be dropped afterwards."""

    @abstractmethod
    def place_matrix(self, host: Tensor) -> Tensor:
        """Likewise a weight [out, in] that only ``linear`` will use, in the layout that is fastest for it."""

    @abstractmethod
    def available_bytes(self) -> int:
        """Memory this process can still take on the device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything given to the device is done (for timing)."""


class CpuDevice(Device):
    """The host: compute on ``threads`` threads of this process."""

    def __init__(self, dtype: torch.dtype, threads: int) -> None:
        self.torch_device = torch.device("cpu")
        self.dtype = dtype
        torch.set_num_threads(threads)
        packable = dtype == torch.float32 or (dtype == torch.bfloat16 and cpu_multiplies_bf16())
        self._packs = packable and torch._C._has_mkldnn
        self._gemv = dtype == torch.bfloat16

    def index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values)

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
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

    def host_empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(tuple(shape), dtype=self.dtype)

    def place(self, host: Tensor) -> Tensor:
        return host

    def place_matrix(self, host: Tensor) -> Tensor:
        # oneDNN's blocked layout. With plain weights every product reorders them again: 1.2 (512 rows) to 2 times
        # (1 and 8 rows) as slow in bf16, over 2 times in fp32.
        return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(host, None)) if self._packs else host

    def available_bytes(self) -> int:
        return min(int(psutil.virtual_memory().available), _cgroup_available_bytes())

    def synchronize(self) -> None:
        return


class CudaDevice(Device):
    """One GPU. Index tensors go through pinned memory on the compute stream."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.torch_device = torch.device(name)
        self.dtype = dtype

    def index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).pin_memory().to(self.torch_device, non_blocking=True)

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(rows, weight, bias)

    def decode_attention(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    def chunk_attention(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, start: int) -> Tensor:
        shape = (*query.shape[:2], *keys.shape[1:])  # the group's heads read one K and V: stride 0
        return F.scaled_dot_product_attention(
            query,
            keys.unsqueeze(1).expand(shape),
            values.unsqueeze(1).expand(shape),
            attn_mask=mask,
            is_causal=mask is None,
        )

    def host_empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(tuple(shape), dtype=self.dtype, pin_memory=True)

    def place(self, host: Tensor) -> Tensor:
        return host.to(self.torch_device, non_blocking=True)  # the pinned allocator keeps host until it is copied

    def place_matrix(self, host: Tensor) -> Tensor:
        return self.place(host)

    def available_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)


def open_device(config: EngineConfig) -> Device:
    """The device and dtype a configuration asks for. Raises ConfigError for a device this machine lacks."""
    has_cuda = torch.cuda.is_available()
    wants_cuda = config.device.startswith("cuda") or (config.device == "auto" and has_cuda)
    if not wants_cuda:
        return CpuDevice(_cpu_dtype(config.dtype), config.threads or usable_cores())
    name = "cuda:0" if config.device in ("auto", "cuda") else config.device
    count = torch.cuda.device_count() if has_cuda else 0
    if int(name.removeprefix("cuda:")) >= count:
        raise ConfigError(
            f"device is '{config.device}' but torch {torch.__version__} sees {count} CUDA devices; use 'cpu'"
        )
    return CudaDevice(name, torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype))


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


def _cpu_dtype(asked: str) -> torch.dtype:
    fast = cpu_multiplies_bf16()
    if asked == "auto":
        if not fast:
            log.info("this CPU has no bfloat16 products: computing in float32")
        return torch.bfloat16 if fast else torch.float32
    if asked == "bfloat16" and not fast:
        log.warning("this CPU has no bfloat16 products: bfloat16 will be very slow; dtype float32 is faster here")
    return cast(torch.dtype, getattr(torch, asked))


def _cgroup_available_bytes() -> int:
    """What the container's limit leaves, or a very large number without one."""
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            return int(Path(limit).read_text()) - int(Path(usage).read_text())
        except (OSError, ValueError):
            continue
    return 2**62
