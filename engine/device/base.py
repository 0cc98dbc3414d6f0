"""What the engine needs of the device that runs the model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..quant.expand import Workspace
from ..quant.kv import KVCodec
from ..quant.matrix import QuantisedMatrix, StoredMatrix
from ..storage.storage import Storage
from ..weights import Matrix


class Slot(Protocol):
    """A buffer that weights or KV pass through: a reader thread fills it while the model computes on another.

    The reader calls ``begin``, writes ``host`` and calls ``upload``; or only ``upload``, with bytes that lie in host
    memory already. The engine's thread calls ``wait`` before it uses ``content`` and ``retire`` after the last use.
    """

    @property
    def host(self) -> Tensor:
        """uint8, page-aligned host memory to read a file into."""

    @property
    def content(self) -> Tensor:
        """uint8, where the model computes. On a CPU the same memory as ``host``."""

    def begin(self) -> None:
        """Wait until ``host`` may be written again."""

    def upload(self, n_bytes: int, source: Tensor | None = None) -> None:
        """Start the way of the first bytes of ``host``, or of ``source``, to ``content``."""

    def download(self, at: int, n_bytes: int) -> None:
        """Bring bytes of ``content``, as they were at ``retire``, to the same place of ``host``, and wait for them."""

    def wait(self) -> None:
        """What the engine's thread asks for from here on sees the uploaded bytes."""

    def retire(self) -> None:
        """What the engine's thread has asked for so far is the last that uses ``content``."""


class Device(ABC):
    """Where the model runs. ``torch_device`` is where its tensors live, ``dtype`` the type it computes in."""

    torch_device: torch.device
    dtype: torch.dtype
    storage: Storage = Storage()
    """Files and threads of the machine that it is part of."""

    @property
    @abstractmethod
    def host(self) -> "Device":
        """The device that computes on host memory: itself on a CPU."""

    @abstractmethod
    def index(self, values: np.ndarray) -> Tensor:
        """A small integer array as a tensor on the device; the copy overlaps with compute where it can."""

    @abstractmethod
    def to_host(self, values: Tensor) -> Tensor:
        """The tensor in host memory, ready to be read."""

    @abstractmethod
    def from_host(self, values: Tensor) -> Tensor:
        """A host tensor on the device."""

    @abstractmethod
    def linear(self, rows: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """rows [R, in] times weight [out, in] transposed, plus bias [out]: [R, out]."""

    def packs(self, matrix: StoredMatrix) -> bool:
        """Whether the device multiplies by these codes as they are."""
        return matrix.packable(self.dtype)

    def expand(self, matrix: QuantisedMatrix, buffer: Tensor, workspace: Workspace) -> Tensor:
        """A matrix in codes expanded into ``buffer``, as ``QuantisedMatrix.expand``."""
        return matrix.expand(buffer, workspace)

    def kv_codec(self, head_dim: int) -> KVCodec:
        """What brings K and V to four bits and back here. Raises ConfigError for heads that it cannot do."""
        return KVCodec(head_dim, device=self.torch_device)

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
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory where the model computes."""

    @abstractmethod
    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised, page-aligned host memory that the device can copy from while it computes."""

    @abstractmethod
    def keep_matrix(self, matrix: Tensor) -> Tensor:
        """A copy of a weight [out, in] that only ``linear`` will use, in the layout that is fastest for it."""

    @abstractmethod
    def open_slot(self, n_bytes: int) -> Slot:
        """A slot for so many bytes."""

    @property
    @abstractmethod
    def fast_dtypes(self) -> tuple[torch.dtype, ...]:
        """Types that it multiplies in hardware, narrow ones first."""

    @property
    @abstractmethod
    def library_bytes(self) -> int:
        """What torch's libraries keep on the device beside all that the engine asks for."""

    @abstractmethod
    def trim(self) -> None:
        """Give back host memory that a large sweep used and nothing uses now."""

    @abstractmethod
    def available_bytes(self) -> int:
        """Memory this process can still take on the device."""

    @abstractmethod
    def total_bytes(self) -> int:
        """Memory of the device; of a host in a container, what the container may have of it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything given to the device is done (for timing)."""
