"""The one place that knows which device runs the model. Everything else works on a ``Device``.

A CPU and a CUDA device differ in where tensors live, how index tensors and weights get there, which dtype is fast, how
attention is computed and how much memory there is.
"""

import logging
from typing import cast

import torch

from ..config import EngineConfig
from ..errors import ConfigError
from .base import Device, Slot
from .cpu import CpuDevice, cpu_multiplies_bf16, query_rows, usable_cores
from .cuda import CudaDevice

__all__ = ["CpuDevice", "Device", "Slot", "cpu_multiplies_bf16", "open_device", "query_rows", "usable_cores"]

log = logging.getLogger(__name__)


def open_device(config: EngineConfig) -> Device:
    """The device and dtype a configuration asks for. Raises ConfigError for a device this machine lacks."""
    has_cuda = torch.cuda.is_available()
    wants_cuda = config.device.startswith("cuda") or (config.device == "auto" and has_cuda)
    threads = config.threads or usable_cores()
    if not wants_cuda:
        return CpuDevice(_cpu_dtype(config.dtype), threads)
    name = "cuda:0" if config.device in ("auto", "cuda") else config.device
    count = torch.cuda.device_count() if has_cuda else 0
    if int(name.removeprefix("cuda:")) >= count:
        raise ConfigError(
            f"device is '{config.device}' but torch {torch.__version__} sees {count} CUDA devices; use 'cpu'"
        )
    dtype = torch.bfloat16 if config.dtype == "auto" else cast(torch.dtype, getattr(torch, config.dtype))
    return CudaDevice(name, dtype, CpuDevice(dtype, threads))


def _cpu_dtype(asked: str) -> torch.dtype:
    fast = cpu_multiplies_bf16()
    if asked == "auto":
        if not fast:
            log.info("this CPU has no bfloat16 products: computing in float32")
        return torch.bfloat16 if fast else torch.float32
    if asked == "bfloat16" and not fast:
        log.warning("this CPU has no bfloat16 products: bfloat16 will be very slow; dtype float32 is faster here")
    return cast(torch.dtype, getattr(torch, asked))
