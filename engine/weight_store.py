"""Where a sweep gets its weights: resident, uploaded from the host, or read from disk while others compute."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from .checkpoint.index import Checkpoint
from .checkpoint.layout import check
from .device import Device, Slot
from .embedding import Embedding
from .loading import Load, run_loads
from .placement import Placement
from .spec import ModelSpec
from .storage.ring import Recipe, Ring
from .tiers import Tiers, take_slots
from .units import MATRICES, Layouts, Unit, UnitLayout, group_of, units
from .weights import AttentionWeights, MlpWeights, NormWeights, attention_weights, mlp_weights, norm_weights


class WeightStore:
    """The weights of one model. Used by the engine's thread; reader threads of its own work ahead of it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        device: Device,
        tiers: Tiers,
        placement: Placement,
        *,
        n_slots: int,
        read_ahead: bool = True,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Load what is resident. ``n_slots`` are for what is not; ``progress`` is told of the bytes loaded.

        Raises CheckpointError for a checkpoint that does not fit the spec, OutOfMemoryError.
        """
        check(checkpoint, spec)
        self._spec, self._device, self._tiers = spec, device, tiers
        self._layouts = Layouts(checkpoint, spec, device.dtype)
        self._kept: dict[Unit, dict[str, Tensor]] = {}
        """Tensors that stay where the model computes: all of a resident unit, the norms and biases of any other."""
        self._streamed: dict[Unit, UnitLayout] = {}
        self.embedding = Embedding(spec, self._layouts, device, tiers, placement[Unit("embedding")])
        loads = list(self.embedding.loads)
        for unit in units(spec.n_layers)[1:]:
            small = [tensor for tensor in group_of(spec, unit) if tensor.name not in MATRICES]
            loads.append(self._kept_load(unit, self._layouts.of(small)))
            for part, layout in self._matrices(unit, placement):
                if placement[unit] == "device":
                    loads.append(self._kept_load(part, layout))
                elif placement[unit] == "host":
                    loads.append(self._host_load(part, layout))
                else:
                    self._streamed[part] = layout
        run_loads(loads, device, tiers, progress)
        if spec.tied and placement[Unit("embedding")] == "device":
            self._kept[Unit("head")]["lm_head.weight"] = self.embedding.tokens
        self._order = [unit for unit in self._visits(range(spec.n_layers), True) if unit in self._streamed]
        self._ring = self._open_ring(n_slots, read_ahead) if self._streamed else None

    @property
    def final_norm(self) -> NormWeights:
        return norm_weights(self._kept[Unit("head")])

    def expect(self, layers: range, head: bool) -> None:
        """A sweep through ``layers`` begins; ``head`` tells whether it will want logits. Reading ahead follows that."""
        if self._ring:
            self._ring.expect([unit for unit in self._visits(layers, head) if unit in self._streamed], self._order)

    @contextmanager
    def attention(self, layer: int) -> Iterator[AttentionWeights]:
        """The attention weights of a layer, for as long as the context is open."""
        with self._open(Unit("attention", layer)) as tensors:
            yield attention_weights(tensors)

    @contextmanager
    def mlp(self, layer: int) -> Iterator[MlpWeights]:
        """The MLP weights of a layer, likewise."""
        with self._open(Unit("mlp", layer)) as tensors:
            yield mlp_weights(tensors)

    @contextmanager
    def head(self, piece: int) -> Iterator[Tensor]:
        """Rows ``head_rows[piece]`` of the LM head [rows, H], likewise."""
        with self._open(Unit("head", piece)) as tensors:
            yield tensors["lm_head.weight"]

    def close(self) -> None:
        """Stop reading ahead and close the files."""
        if self._ring:
            self._ring.close()
        self._layouts.close()

    @contextmanager
    def _open(self, unit: Unit) -> Iterator[Mapping[str, Tensor]]:
        layout = self._streamed.get(unit)
        if layout is None or self._ring is None:
            yield self._kept[unit]
            return
        slot = self._ring.acquire(unit)
        try:
            yield self._kept.get(unit, {}) | layout.views(slot.content)
        finally:
            self._ring.release(unit)

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
            return [(unit, self._layouts.of([tensor for tensor in group_of(spec, unit) if tensor.name in MATRICES]))]
        shape = (spec.vocab_size, spec.hidden_size)
        if spec.tied and placement[unit] == "device":
            self.head_rows = [range(spec.vocab_size)]
            return []
        self.head_rows = self._layouts.row_ranges(shape)
        holder = group_of(spec, Unit("embedding") if spec.tied else unit)
        source = next(tensor.parts[0].source for tensor in holder if tensor.shape == shape)
        info = self._layouts.info(source)
        pieces = [self._layouts.rows("lm_head.weight", info, rows) for rows in self.head_rows]
        return [(Unit("head", i), layout) for i, layout in enumerate(pieces)]

    def _kept_load(self, unit: Unit, layout: UnitLayout) -> Load:
        self._tiers["device"].hold(layout.tensor_bytes, "weights")

        def keep(slot: Slot) -> None:
            kept = self._kept.setdefault(unit, {})
            for name, tensor in layout.views(slot.content).items():
                kept[name] = self._device.keep_matrix(tensor) if name in MATRICES else tensor.clone()

        return Load(layout, keep)

    def _host_load(self, unit: Unit, layout: UnitLayout) -> Load:
        host = self._tiers["host"].allocate((layout.n_bytes,), torch.uint8, "weights")
        self._streamed[unit] = UnitLayout(layout.tensors, Recipe(layout.n_bytes, source=host))

        def keep(slot: Slot) -> None:
            host.copy_(slot.host[: layout.n_bytes])

        return Load(layout, keep)

    def _open_ring(self, n_slots: int, read_ahead: bool) -> Ring[Unit]:
        size = max(layout.n_bytes for layout in self._streamed.values())
        slots = take_slots(self._device, self._tiers, n_slots, size)
        return Ring(slots, lambda unit: self._streamed[unit].recipe, ahead=read_ahead)
