"""A device whose tensors have shapes and no content, and whose operations advance a clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...device import Device, Slot
from ...device.cpu import LIBRARY_BYTES as CPU_LIBRARY_BYTES
from ...device.cuda import LIBRARY_BYTES as CUDA_LIBRARY_BYTES
from ...quant.expand import Workspace
from ...quant.kv import KVCodec
from ...quant.matrix import Int8Matrix, PackedMatrix, QuantisedMatrix, StoredMatrix
from ...storage.transfer import WORKERS
from ...weights import Matrix
from ..hardware import Hardware
from ..processor import Processor
from .clock import Clock, Link
from .storage import Links, SimulatedStorage

META = torch.device("meta")
LINEARS = 4
"""Products of a layer, among which its small operations' time is shared out."""


@dataclass(slots=True, eq=False)
class SimulatedSlot:
    """``content`` is ``host`` where the device computes on host memory."""

    host: Tensor
    content: Tensor

    def begin(self) -> None:
        return

    def upload(self, n_bytes: int, source: Tensor | None = None) -> None:
        return

    def download(self, at: int, n_bytes: int) -> None:
        return

    def wait(self) -> None:
        return

    def retire(self) -> None:
        return


class SimulatedCodec(KVCodec):
    """Takes its time to decode; encoding, of a position for every sequence and layer, is among the small operations."""

    def __init__(self, head_dim: int, spend: Callable[[int], None]) -> None:
        super().__init__(head_dim, device=META)
        self._spend = spend

    def encode(self, heads: Tensor, out: Tensor | None = None) -> Tensor:
        return heads.new_empty((len(heads), self.row_bytes), dtype=torch.uint8) if out is None else out

    def decode(self, rows: Tensor, out: Tensor) -> Tensor:
        self._spend(out.numel())
        return out


class SimulatedDevice(Device):
    """The device of ``hardware``, or with ``host`` None its host. Several may share a clock."""

    def __init__(
        self,
        processor: Processor,
        dtype: torch.dtype,
        clock: Clock,
        links: Links,
        storage: SimulatedStorage,
        memory_bytes: int,
        *,
        host: "SimulatedDevice | None" = None,
    ) -> None:
        self.torch_device = META
        self.dtype = dtype
        self.storage = storage
        self.clock, self.links = clock, links
        self._processor = processor
        self._memory_bytes = memory_bytes
        self._host = host
        self._kept: set[int] = set()
        """Weights in the layout that multiplies fastest, by identity."""
        self._name = "host" if host is None and links.to_host is not links.to_device else "device"

    @classmethod
    def of(cls, hardware: Hardware, dtype: torch.dtype) -> "SimulatedDevice":
        """The device of a machine, at second 0."""
        clock = Clock()
        copy = Link(clock, "host memory", (hardware.host or hardware.device).memory_bytes_s / 2)
        disk = Link(
            clock,
            "disk",
            hardware.disk_read or 1.0,
            hardware.disk_write or 1.0,
            cpu_s=hardware.read_cpu_s,
            latency_s=hardware.disk_piece_s or hardware.disk_latency_s / WORKERS,
        )
        to_device = Link(clock, "to device", hardware.to_device) if hardware.separate else copy
        to_host = Link(clock, "to host", hardware.to_host) if hardware.separate else copy
        links = Links(disk, copy, to_device, to_host)
        storage = SimulatedStorage(clock, links, hardware.disk_bytes, hardware.disk_latency_s)
        host = None
        if hardware.host is not None:
            host = cls(hardware.host, dtype, clock, links, storage, hardware.host_bytes)
        return cls(hardware.device, dtype, clock, links, storage, hardware.device_bytes, host=host)

    @property
    def host(self) -> Device:
        return self if self._host is None else self._host

    def index(self, values: np.ndarray) -> Tensor:
        return torch.empty(values.shape, dtype=torch.from_numpy(values[:0]).dtype, device=META)

    def to_host(self, values: Tensor) -> Tensor:
        return self._move(self.links.to_host, values)

    def from_host(self, values: Tensor) -> Tensor:
        return self._move(self.links.to_device, values)

    def linear(self, rows: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        out, inner = weight.shape
        count = rows.shape[0]
        kind = str(self.dtype).removeprefix("torch.")
        if isinstance(weight, PackedMatrix):
            kind = "int8" if isinstance(weight, Int8Matrix) else "int4"
        seconds = self._processor.product_s(kind, count, out * inner, id(weight) in self._kept)
        self._compute(seconds, "products")
        small = 2 * count * (out + inner) * self.dtype.itemsize / self._processor.memory_bytes_s
        self._compute(small + self._processor.layer_s / LINEARS, "small operations")
        return rows.new_empty(count, out)

    def packs(self, matrix: StoredMatrix) -> bool:
        bits = matrix.parts[0].scheme.bits
        return f"int{bits}" in self._processor.products and matrix.packable(self.dtype)

    def expand(self, matrix: QuantisedMatrix, buffer: Tensor, workspace: Workspace) -> Tensor:
        elements = matrix.shape[0] * matrix.shape[1]
        self._compute(elements / self._processor.expand_elements_s, "expanding weights")
        return buffer[:elements].view(matrix.shape)

    def kv_codec(self, head_dim: int) -> KVCodec:
        return SimulatedCodec(
            head_dim, lambda elements: self._compute(elements / self._processor.expand_elements_s, "expanding KV")
        )

    def decode_attention(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        n_bytes = keys.nbytes + values.nbytes
        self._compute(n_bytes / self._processor.decode_attention(n_bytes), "decode attention")
        return torch.empty_like(query)

    def chunk_attention(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, start: int) -> Tensor:
        n_kv, group, count, width = query.shape
        flops = 4 * n_kv * group * count * width * (start + count / 2)
        self._compute(flops / self._processor.chunk_attention(flops), "prompt attention")
        return torch.empty_like(query)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=META)

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.empty(shape, dtype)

    def keep_matrix(self, matrix: Tensor) -> Tensor:
        kept = torch.empty_like(matrix)
        self._kept.add(id(kept))  # which lives as long as the engine
        return kept

    def open_slot(self, n_bytes: int) -> Slot:
        host = self.empty((n_bytes,), torch.uint8)
        return SimulatedSlot(host, host if self._host is None else self.empty((n_bytes,), torch.uint8))

    @property
    def fast_dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.dtype,)

    def total_bytes(self) -> int:
        return self._memory_bytes

    @property
    def library_bytes(self) -> int:
        return CPU_LIBRARY_BYTES if self._host is None else CUDA_LIBRARY_BYTES

    def sweep(self, n_sequences: int) -> None:
        """Spend what a sweep of so many sequences takes beside its layers."""
        self._compute(self._processor.sweep_s + n_sequences * self._processor.row_s, "scheduling and sampling")

    def trim(self) -> None:
        return

    def available_bytes(self) -> int:
        return self._memory_bytes

    def synchronize(self) -> None:
        return

    def _compute(self, seconds: float, what: str) -> None:
        self.clock.compute(seconds, self._name, what)

    def _move(self, link: Link, values: Tensor) -> Tensor:
        if self._host is not None:
            self.clock.wait_until(link.carry(values.nbytes, self.clock.now_s, "activations"))
        return values
