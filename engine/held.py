"""What is held of a model's weights, unit by unit, so that models cut at different depths share what they have in
common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .device import Device, Slot
from .embedding import Embedding
from .loading import Load, run_loads
from .placement import Placement
from .quant.matrix import QuantisedMatrix, StoredMatrix
from .quant.ready import keep
from .spec import ModelSpec
from .storage.transfer import Recipe
from .tiers import Tiers
from .units import Layouts, Unit, UnitLayout, group_of, is_matrix, units


@dataclass(slots=True, eq=False)
class Part:
    """Some tensors of a unit. Compared by identity: two sets of weights may hold the same."""

    device_bytes: int = 0
    tensors: dict[str, Tensor | QuantisedMatrix] = field(default_factory=dict)
    """Where the model computes; empty for what is brought there for each sweep."""
    streamed: UnitLayout | None = None
    """How that is done."""
    host: Tensor | None = None
    """Where it is brought from, if not from disk."""

    def release(self, tiers: Tiers) -> None:
        """Strike it out of the ledgers."""
        tiers["device"].let_go(self.device_bytes, "weights")
        if self.host is not None:
            tiers["host"].free(self.host)


@dataclass(frozen=True, slots=True)
class Weights:
    """Of a model of ``n_layers``. Norms and biases are ``small``, and always where the model computes."""

    n_layers: int
    embedding: Embedding
    small: Mapping[Unit, Part]
    matrices: Mapping[Unit, Part]
    head_rows: list[range]
    """The LM head's rows by the pieces it is cut into."""

    def parts(self) -> dict[int, Part]:
        """By identity."""
        return {id(part): part for group in (self.small, self.matrices) for part in group.values()}

    def release(self, tiers: Tiers, but: "Weights | None" = None) -> None:
        """Strike out of the ledgers what ``but`` does not hold. The caller drops its last reference."""
        kept = but.parts() if but else {}
        for number, part in self.parts().items():
            if number not in kept:
                part.release(tiers)
        if but is None or but.embedding is not self.embedding:
            self.embedding.release(tiers)


class Common(NamedTuple):
    """Weights that are there already."""

    weights: Weights
    placement: Placement
    layers: int
    """The first so many are the same, and embedding and LM head."""

    def holds(self, unit: Unit, placement: Placement) -> bool:
        """Whether the unit's matrices are there, and where ``placement`` wants them."""
        same = unit.kind in ("embedding", "head") or unit.number < self.layers
        return same and self.placement.get(unit) == placement[unit] != "disk"


def load_weights(
    layouts: Layouts,
    spec: ModelSpec,
    device: Device,
    tiers: Tiers,
    placement: Placement,
    common: Common | None = None,
    progress: Callable[[int], None] | None = None,
) -> Weights:
    """Read what ``placement`` wants in memory and ``common`` does not hold.

    ``layouts`` are those of a checkpoint that ``check_model`` accepts. Raises CheckpointError, OutOfMemoryError, and
    holds nothing then.
    """
    loading = _Loading(layouts, spec, device, tiers, placement, common)
    try:
        weights = loading.plan()
        run_loads(loading.loads, device, tiers, progress)
    except BaseException:
        loading.undo()
        raise
    finally:
        loading.loads.clear()  # which hold what they fill
    return weights


class _Loading:
    def __init__(
        self,
        layouts: Layouts,
        spec: ModelSpec,
        device: Device,
        tiers: Tiers,
        placement: Placement,
        common: Common | None,
    ) -> None:
        self._layouts, self._spec, self._device, self._tiers = layouts, spec, device, tiers
        self._placement, self._common = placement, common
        self._made: list[Part] = []
        self._embedding: Embedding | None = None
        self.loads: list[Load] = []

    def plan(self) -> Weights:
        """Takes the memory; ``loads`` fill it."""
        embedding = self._embeddings()
        *layers, head = units(self._spec.n_layers)[1:]
        small = {unit: self._small(unit) for unit in (*layers, head)}
        matrices = {unit: self._matrices(unit, unit, self._layout(unit, matrices=True)) for unit in layers}
        if self._spec.tied and self._placement[head] == "device":
            rows = [range(self._spec.vocab_size)]
            matrices[head] = Part(tensors={"lm_head.weight": embedding.tokens})
        else:
            rows, pieces = self._head(head)
            matrices |= {number: self._matrices(head, number, layout) for number, layout in pieces.items()}
        return Weights(self._spec.n_layers, embedding, small, matrices, rows)

    def undo(self) -> None:
        for part in self._made:
            part.release(self._tiers)
        if self._embedding:
            self._embedding.release(self._tiers)

    def _embeddings(self) -> Embedding:
        unit = Unit("embedding")
        if self._common and self._common.holds(unit, self._placement):
            return self._common.weights.embedding
        self._embedding = Embedding(self._spec, self._layouts, self._device, self._tiers, self._placement[unit])
        self.loads += self._embedding.loads
        return self._embedding

    def _small(self, unit: Unit) -> Part:
        if self._common and unit.kind != "head" and unit.number < self._common.layers:
            return self._common.weights.small[unit]
        layout = self._layout(unit, matrices=False)
        part = self._take(layout)

        def copy(slot: Slot) -> None:
            views = layout.views(slot.content)
            part.tensors.update({name: view.clone() for name, view in views.items() if isinstance(view, Tensor)})

        self.loads.append(Load(layout, copy))
        return part

    def _matrices(self, unit: Unit, number: Unit, layout: UnitLayout) -> Part:
        """``number`` is that of the head's piece, or the unit itself."""
        if self._common and self._common.holds(unit, self._placement):
            return self._common.weights.matrices[number]
        tier = self._placement[unit]
        if tier == "disk":
            return Part(streamed=layout)
        if tier == "host":
            return self._on_host(layout)
        part = self._take(layout)

        def copy(slot: Slot) -> None:
            part.tensors.update({name: self._keep(view) for name, view in layout.views(slot.content).items()})

        self.loads.append(Load(layout, copy))
        return part

    def _on_host(self, layout: UnitLayout) -> Part:
        host = self._tiers["host"].allocate((layout.n_bytes,), torch.uint8, "weights")
        part = Part(streamed=UnitLayout(layout.tensors, Recipe(layout.n_bytes, source=host)), host=host)
        self._made.append(part)
        self.loads.append(Load(layout, lambda slot: host.copy_(slot.host[: layout.n_bytes])))
        return part

    def _take(self, layout: UnitLayout) -> Part:
        self._tiers["device"].hold(layout.tensor_bytes, "weights")
        self._made.append(Part(layout.tensor_bytes))
        return self._made[-1]

    def _keep(self, matrix: Tensor | StoredMatrix) -> Tensor | QuantisedMatrix:
        if isinstance(matrix, StoredMatrix):
            return keep(matrix, self._device)
        return self._device.keep_matrix(matrix)

    def _layout(self, unit: Unit, matrices: bool) -> UnitLayout:
        return self._layouts.of([t for t in group_of(self._spec, unit) if is_matrix(unit, t.name) == matrices])

    def _head(self, unit: Unit) -> tuple[list[range], dict[Unit, UnitLayout]]:
        """The rows of the head's pieces, and their layouts."""
        spec = self._spec
        shape = (spec.vocab_size, spec.hidden_size)
        if self._layouts.quantisation and self._layouts.quantisation.lm_head:
            return [range(spec.vocab_size)], {unit: self._layout(unit, matrices=True)}
        rows = self._layouts.row_ranges(shape)
        holder = group_of(spec, Unit("embedding") if spec.tied else unit)
        source = next(tensor.parts[0].source for tensor in holder if tensor.shape == shape)
        info = self._layouts.info(source)
        pieces = {Unit("head", i): self._layouts.rows("lm_head.weight", info, part) for i, part in enumerate(rows)}
        return rows, pieces
