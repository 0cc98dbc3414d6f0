"""The embedding tables, looked up where they lie: on the device, on the host, or row by row in the checkpoint."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .checkpoint.index import TensorInfo
from .checkpoint.layout import embedding_group
from .config import TierName
from .device import Device, Slot
from .loading import Load
from .spec import ModelSpec
from .storage.direct import Bounce
from .tiers import Tier
from .units import Layouts, ReadPiece, UnitLayout


class Table(Protocol):
    """An embedding table [V, H]."""

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` [R] as [R, H], where the model computes."""


class DeviceTable(NamedTuple):
    values: Tensor

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.values)


class HostTable(NamedTuple):
    values: Tensor
    device: Device

    def rows(self, ids: Tensor) -> Tensor:
        return self.device.from_host(F.embedding(self.device.to_host(ids), self.values))


class FileTable:
    """Rows are read when they are asked for: a few KiB for each token, where the whole table takes hundreds of MiB."""

    def __init__(self, info: TensorInfo, layouts: Layouts, device: Device) -> None:
        self._info, self._device = info, device
        self._file = layouts.file(info)
        self._bounce = Bounce()

    def rows(self, ids: Tensor) -> Tensor:
        wanted, places = torch.unique(self._device.to_host(ids), return_inverse=True)
        dtype, stored, width = self._device.dtype, self._info.dtype, self._info.shape[1]
        row_bytes = width * stored.itemsize
        found = torch.empty(len(wanted), width, dtype=dtype)
        flat = found.view(-1).view(torch.uint8)
        for i, row in enumerate(wanted.tolist()):
            at = i * width * dtype.itemsize
            piece = ReadPiece(self._file, self._info.offset + row * row_bytes, width, stored, at, dtype)
            piece.run(flat, self._bounce)
        self._file.check()
        return self._device.from_host(found[places])


class Embedding:
    """Token embeddings, and position embeddings where they are learned."""

    def __init__(
        self, spec: ModelSpec, layouts: Layouts, device: Device, tiers: Mapping[TierName, Tier], at: TierName
    ) -> None:
        """Takes the tables' memory; ``loads`` fills it. Raises OutOfMemoryError."""
        self._spec = spec
        self._tables: dict[str, Table] = {}
        self.loads: list[Load] = []
        for tensor in embedding_group(spec):
            info = layouts.info(tensor.parts[0].source)
            if at == "disk":
                self._tables[tensor.name] = FileTable(info, layouts, device)
                continue
            values = tiers[at].allocate(tensor.shape, device.dtype, "weights")
            self._tables[tensor.name] = DeviceTable(values) if at == "device" else HostTable(values, device)
            for rows in layouts.row_ranges(tensor.shape):
                layout = layouts.rows(tensor.name, info, rows)
                self.loads.append(Load(layout, _copy(layout, values[rows.start : rows.stop], at)))

    def release(self, tiers: Mapping[TierName, Tier]) -> None:
        """Strike the tables out of the ledgers. The caller drops its last reference."""
        for table in self._tables.values():
            if isinstance(table, DeviceTable | HostTable):
                tiers["device" if isinstance(table, DeviceTable) else "host"].free(table.values)

    @property
    def on_disk(self) -> bool:
        """Whether tokens are looked up in the checkpoint."""
        return isinstance(self._tables["tokens.weight"], FileTable)

    @property
    def tokens(self) -> Tensor:
        """The token table [V, H]; only where it is on the device."""
        table = self._tables["tokens.weight"]
        assert isinstance(table, DeviceTable), "a tied head uses the table only if both are on the device"
        return table.values

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [R, H] of tokens [R] at positions [R]."""
        hidden = self._tables["tokens.weight"].rows(token_ids)
        if learned := self._tables.get("positions.weight"):
            hidden = hidden + learned.rows(positions + self._spec.position_offset)
        return hidden


def _copy(layout: UnitLayout, place: Tensor, at: TierName) -> Callable[[Slot], object]:
    """Puts the one tensor of a layout into its place."""

    def keep(slot: Slot) -> None:
        (values,) = layout.views(slot.content if at == "device" else slot.host).values()
        assert isinstance(values, Tensor), "embedding tables are never in codes"
        place.copy_(values)

    return keep
