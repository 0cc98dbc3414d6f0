"""An NVIDIA GPU as the device that runs the model."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..quant.matrix import PackedMatrix
from ..weights import Matrix
from .base import Device

LIBRARY_BYTES = 128 * 2**20
"""cuBLAS and attention workspaces. An estimate: not measured."""
AMPERE = (8, 0)
"""The first compute capability that multiplies bfloat16; older GPUs emulate it."""


class CudaDevice(Device):
    """One GPU. Index tensors go through pinned memory on the compute stream."""

    def __init__(self, name: str, dtype: torch.dtype, host: Device) -> None:
        """``host`` computes on what stays in host memory."""
        self.torch_device = torch.device(name)
        self.dtype = dtype
        self._host = host
        self._uploads = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._downloads = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    @property
    def host(self) -> Device:
        return self._host

    def index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).pin_memory().to(self.torch_device, non_blocking=True)

    def to_host(self, values: Tensor) -> Tensor:
        return values.cpu()

    def from_host(self, values: Tensor) -> Tensor:
        return values.to(self.torch_device, non_blocking=True)

    def linear(self, rows: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, PackedMatrix):
            return weight.product(rows, bias)
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

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def keep_matrix(self, matrix: Tensor) -> Tensor:
        return matrix.clone()

    def open_slot(self, n_bytes: int) -> "CudaSlot":
        return CudaSlot(n_bytes, self.torch_device, self._uploads, self._downloads)

    @property
    def fast_dtypes(self) -> tuple[torch.dtype, ...]:
        halves = (torch.float16, torch.float32)
        has_bf16 = torch.cuda.get_device_capability(self.torch_device) >= AMPERE
        return (torch.bfloat16, *halves) if has_bf16 else halves

    @property
    def library_bytes(self) -> int:
        return LIBRARY_BYTES

    def trim(self) -> None:
        self._host.trim()

    def available_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[1])

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)


class CudaSlot:
    """Pinned memory, device memory of the same size, and the events that order their uses."""

    def __init__(
        self, n_bytes: int, device: torch.device, uploads: torch.cuda.Stream, downloads: torch.cuda.Stream
    ) -> None:
        """Copies to the device run on ``uploads``, those back beside them on ``downloads``."""
        self.host = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
        self.content = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        self._uploads, self._downloads = uploads, downloads
        self._uploaded = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._retired = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self._uploaded.synchronize()

    def upload(self, n_bytes: int, source: Tensor | None = None) -> None:
        with torch.cuda.stream(self._uploads):
            self._uploads.wait_event(self._retired)
            self.content[:n_bytes].copy_((self.host if source is None else source)[:n_bytes], non_blocking=True)
            self._uploaded.record(self._uploads)

    def download(self, at: int, n_bytes: int) -> None:
        part, done = slice(at, at + n_bytes), torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._downloads):
            self._downloads.wait_event(self._retired)
            self.host[part].copy_(self.content[part], non_blocking=True)
            done.record(self._downloads)
        done.synchronize()

    def wait(self) -> None:
        torch.cuda.current_stream(self.content.device).wait_event(self._uploaded)

    def retire(self) -> None:
        self._retired.record(torch.cuda.current_stream(self.content.device))
