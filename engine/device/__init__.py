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

__all__ = [
    "CpuDevice",
    "Device",
    "Slot",
    "cpu_multiplies_bf16",
    "gpu_name",
    "open_device",
    "query_rows",
    "usable_cores",
]

log = logging.getLogger(__name__)


def open_device(config: EngineConfig) -> Device:
    """The device and dtype a configuration asks for. Raises ConfigError for a device this machine lacks."""
    threads = config.threads or usable_cores()
    name = _cuda_name(config.device)
    if name is None:
        return CpuDevice(_cpu_dtype(config.dtype), threads)
    if not _has_cuda(name):
        raise ConfigError(
            f"device is '{config.device}' but torch {torch.__version__} sees {_cuda_count()} CUDA devices; use 'cpu'"
        )
    dtype = torch.bfloat16 if config.dtype == "auto" else cast(torch.dtype, getattr(torch, config.dtype))
    return CudaDevice(name, dtype, CpuDevice(dtype, threads))


def gpu_name(device: str) -> str | None:
    """The maker's name of the GPU that a configuration's ``device`` stands for; None if that is a CPU or not there."""
    name = _cuda_name(device)
    return str(torch.cuda.get_device_name(name)) if name and _has_cuda(name) else None


def _cuda_name(device: str) -> str | None:
    """torch's name of the CUDA device that is asked for, None for the CPU."""
    if device == "auto":
        return "cuda:0" if _cuda_count() else None
    if device == "cuda":
        return "cuda:0"
    return device if device.startswith("cuda") else None


def _cuda_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _has_cuda(name: str) -> bool:
    return int(name.removeprefix("cuda:")) < _cuda_count()


def _cpu_dtype(asked: str) -> torch.dtype:
    fast = cpu_multiplies_bf16()
    if asked == "auto":
        if not fast:
            log.info("this CPU has no bfloat16 products: computing in float32")
        return torch.bfloat16 if fast else torch.float32
    if asked == "bfloat16" and not fast:
        log.warning("this CPU has no bfloat16 products: bfloat16 will be very slow; dtype float32 is faster here")
    return cast(torch.dtype, getattr(torch, asked))
