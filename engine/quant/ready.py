"""From codes to what a sweep of so many rows multiplies by: the kernel's form for few, the expanded matrix for many."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from .expand import WORKSPACE_BYTES, Workspace
from .groups import Quantised
from .matrix import KERNEL_ROWS, PackedMatrix, QuantisedMatrix, StoredMatrix

if TYPE_CHECKING:  # devices are built upon these matrices
    from ..device.base import Device


class Expander:
    """Makes a unit's matrices ready, once for each sweep, in a buffer that lasts until the next unit is made ready."""

    def __init__(self, buffer: Tensor, device: "Device") -> None:
        """``buffer`` (of the compute dtype) has room for all elements of any unit; ``device`` multiplies."""
        self._buffer = buffer
        self._device = device
        self._workspace = Workspace(buffer.device)

    @staticmethod
    def workspace_bytes() -> int:
        return WORKSPACE_BYTES

    def ready(self, matrices: Mapping[str, Tensor | QuantisedMatrix], rows: int) -> dict[str, Tensor | PackedMatrix]:
        """The matrices for products with so many rows."""
        made: dict[str, Tensor | PackedMatrix] = {}
        used = 0
        for name, matrix in matrices.items():
            if isinstance(matrix, Tensor):
                made[name] = matrix
                continue
            free = self._buffer[used:]
            if rows <= KERNEL_ROWS and isinstance(matrix, StoredMatrix) and self._device.packs(matrix):
                scales = _scales(free, matrix.parts[0])
                made[name], used = matrix.pack(scales), used + scales.numel()
            elif rows <= KERNEL_ROWS and isinstance(matrix, PackedMatrix):
                made[name] = matrix
            else:
                made[name] = self._device.expand(matrix, free, self._workspace)
                used += matrix.shape[0] * matrix.shape[1]
        return made


def keep(matrix: StoredMatrix, device: "Device") -> QuantisedMatrix:
    """A copy of a matrix in a slot that stays: in the kernel's form where there is one, of as many bytes."""
    kept = [Quantised(q.codes.clone(), q.scale, q.minimum, q.shape, q.scheme) for q in matrix.parts]
    copy = StoredMatrix(kept)
    if device.packs(copy):
        return copy.pack()
    return StoredMatrix([Quantised(q.codes, q.scale.clone(), q.minimum.clone(), q.shape, q.scheme) for q in kept])


def _scales(free: Tensor, q: Quantised) -> Tensor:
    """Room for a four-bit matrix's scales as the kernel wants them; an eight-bit one takes none."""
    if q.scheme.bits == 8:
        return free[:0]
    columns = q.shape[1] // q.scheme.group_of(q.shape)
    return free[: columns * q.shape[0] * 2].view(columns, q.shape[0], 2)
