"""Where a sweep gets its weights: resident, uploaded from the host, or read from disk while others compute."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor

from .device import Device, Slot
from .embedding import Embedding
from .loading import Load, run_loads
from .placement import Placement
from .quant.matrix import QuantisedMatrix, StoredMatrix
from .quant.ready import Expander, keep
from .spec import ModelSpec
from .storage.ring import Ring
from .storage.transfer import Recipe
from .tiers import Tiers, take_slots
from .units import Layouts, Unit, UnitLayout, group_of, is_matrix, units
from .weights import (
    AttentionWeights,
    HeadWeights,
    Matrix,
    MlpWeights,
    attention_weights,
    head_weights,
    mlp_weights,
)


class WeightStore:
    """The weights of one model. Used by the engine's thread; reader threads of its own work ahead of it."""

    def __init__(
        self,
        layouts: Layouts,
        spec: ModelSpec,
        device: Device,
        tiers: Tiers,
        placement: Placement,
        *,
        n_slots: int,
        expansion_bytes: int = 0,
        read_ahead: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Load what is resident. ``n_slots`` are for what is not, ``expansion_bytes`` for the codes of a quantised
        unit to be expanded into; ``progress`` is told of the bytes loaded.

        ``layouts`` are those of a checkpoint that ``check_model`` accepts. Raises CheckpointError, OutOfMemoryError.
        """
        self._layouts = layouts
        self._spec, self._device, self._tiers = spec, device, tiers
        self._expander = self._open_expander(expansion_bytes)
        self._small: dict[Unit, dict[str, Tensor]] = {}
        """Norms and biases, which stay where the model computes."""
        self._kept: dict[Unit, dict[str, Tensor | QuantisedMatrix]] = {}
        """Matrices that stay there."""
        self._streamed: dict[Unit, UnitLayout] = {}
        self.embedding = Embedding(spec, self._layouts, device, tiers, placement[Unit("embedding")])
        loads = list(self.embedding.loads)
        for unit in units(spec.n_layers)[1:]:
            loads.append(self._small_load(unit))
            for part, layout in self._matrices(unit, placement):
                if placement[unit] == "device":
                    loads.append(self._kept_load(part, layout))
                elif placement[unit] == "host":
                    loads.append(self._host_load(part, layout))
                else:
                    self._streamed[part] = layout
        run_loads(loads, device, tiers, progress)
        if spec.tied and placement[Unit("embedding")] == "device":
            self._kept[Unit("head")] = {"lm_head.weight": self.embedding.tokens}
        self._order = [unit for unit in self._visits(range(spec.n_layers), True) if unit in self._streamed]
        self._ring = self._open_ring(n_slots, read_ahead) if self._streamed else None

    @property
    def before_head(self) -> HeadWeights:
        """What the last states pass before the LM head."""
        return head_weights(self._small[Unit("head")])

    def expect(self, layers: range, head: bool) -> None:
        """A sweep through ``layers`` begins; ``head`` tells whether it will want logits. Reading ahead follows that."""
        if self._ring:
            self._ring.expect([unit for unit in self._visits(layers, head) if unit in self._streamed], self._order)

    @contextmanager
    def attention(self, layer: int, rows: int) -> Iterator[AttentionWeights]:
        """The attention weights of a layer, for a sweep of ``rows``, for as long as the context is open."""
        unit = Unit("attention", layer)
        with self._open(unit, rows) as matrices:
            yield attention_weights(self._small[unit], matrices)

    @contextmanager
    def mlp(self, layer: int, rows: int) -> Iterator[MlpWeights]:
        """The MLP weights of a layer, likewise."""
        unit = Unit("mlp", layer)
        with self._open(unit, rows) as matrices:
            yield mlp_weights(self._small[unit], matrices)

    @contextmanager
    def head(self, piece: int, rows: int) -> Iterator[Matrix]:
        """Rows ``head_rows[piece]`` of the LM head [rows of it, H], likewise."""
        with self._open(Unit("head", piece), rows) as matrices:
            yield matrices["lm_head.weight"]

    def close(self) -> None:
        """Stop reading ahead."""
        if self._ring:
            self._ring.close()

    @contextmanager
    def _open(self, unit: Unit, rows: int) -> Iterator[Mapping[str, Matrix]]:
        layout = self._streamed.get(unit)
        if layout is None or self._ring is None:
            yield self._ready(self._kept[unit], rows)
            return
        slot = self._ring.acquire(unit)
        try:
            yield self._ready(layout.views(slot.content), rows)
        finally:
            self._ring.release(unit)

    def _ready(self, matrices: Mapping[str, Tensor | QuantisedMatrix], rows: int) -> Mapping[str, Matrix]:
        if self._expander:
            return self._expander.ready(matrices, rows)
        return cast(Mapping[str, Matrix], matrices)  # without quantisation there are only tensors

    def _open_expander(self, expansion_bytes: int) -> Expander | None:
        if self._layouts.quantisation is None:
            return None
        self._tiers["device"].hold(Expander.workspace_bytes(), "workspace")
        dtype = self._device.dtype
        buffer = self._tiers["device"].allocate((expansion_bytes // dtype.itemsize,), dtype, "workspace")
        return Expander(buffer, self._device)

    def _visits(self, layers: range, head: bool) -> Iterator[Unit]:
        for layer in layers:
            yield Unit("attention", layer)
            yield Unit("mlp", layer)
        if head:
            for piece in range(len(self.head_rows)):
                yield Unit("head", piece)

    def _matrices(self, unit: Unit, placement: Placement) -> list[tuple[Unit, UnitLayout]]:
        """What is placed of a unit: one layout, or those of the head's pieces; none of a head that is the embedding."""
        spec = self._spec
        if unit.kind != "head":
            return [(unit, self._layouts.of([t for t in group_of(spec, unit) if is_matrix(unit, t.name)]))]
        shape = (spec.vocab_size, spec.hidden_size)
        if spec.tied and placement[unit] == "device":
            self.head_rows = [range(spec.vocab_size)]
            return []
        if self._layouts.quantisation and self._layouts.quantisation.lm_head:
            self.head_rows = [range(spec.vocab_size)]
            return [(unit, self._layouts.of([t for t in group_of(spec, unit) if is_matrix(unit, t.name)]))]
        self.head_rows = self._layouts.row_ranges(shape)
        holder = group_of(spec, Unit("embedding") if spec.tied else unit)
        source = next(tensor.parts[0].source for tensor in holder if tensor.shape == shape)
        info = self._layouts.info(source)
        pieces = [self._layouts.rows("lm_head.weight", info, rows) for rows in self.head_rows]
        return [(Unit("head", i), layout) for i, layout in enumerate(pieces)]

    def _small_load(self, unit: Unit) -> Load:
        layout = self._layouts.of([t for t in group_of(self._spec, unit) if not is_matrix(unit, t.name)])
        self._tiers["device"].hold(layout.tensor_bytes, "weights")

        def copy(slot: Slot) -> None:
            views = layout.views(slot.content)
            self._small[unit] = {name: view.clone() for name, view in views.items() if isinstance(view, Tensor)}

        return Load(layout, copy)

    def _kept_load(self, unit: Unit, layout: UnitLayout) -> Load:
        self._tiers["device"].hold(layout.tensor_bytes, "weights")

        def copy(slot: Slot) -> None:
            self._kept[unit] = {name: self._keep(view) for name, view in layout.views(slot.content).items()}

        return Load(layout, copy)

    def _keep(self, matrix: Tensor | StoredMatrix) -> Tensor | QuantisedMatrix:
        if isinstance(matrix, StoredMatrix):
            return keep(matrix, self._device)
        return self._device.keep_matrix(matrix)

    def _host_load(self, unit: Unit, layout: UnitLayout) -> Load:
        host = self._tiers["host"].allocate((layout.n_bytes,), torch.uint8, "weights")
        self._streamed[unit] = UnitLayout(layout.tensors, Recipe(layout.n_bytes, source=host))

        def copy(slot: Slot) -> None:
            host.copy_(slot.host[: layout.n_bytes])

        return Load(layout, copy)

    def _open_ring(self, n_slots: int, read_ahead: bool) -> Ring[Unit]:
        size = max(layout.n_bytes for layout in self._streamed.values())
        slots = take_slots(self._device, self._tiers, n_slots, size)
        workers = self._device.storage.workers()
        return Ring(slots, lambda unit: self._streamed[unit].recipe, workers, ahead=read_ahead)
