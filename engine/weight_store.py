"""Where a sweep gets its weights: resident, uploaded from the host, or read from disk while others compute."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

from torch import Tensor

from .device import Device, Slot
from .embedding import Embedding
from .held import Weights
from .quant.matrix import QuantisedMatrix
from .quant.ready import Expander
from .storage.ring import Ring
from .storage.transfer import Recipe
from .tiers import Tiers, give_slots
from .units import Layouts, Unit
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
        device: Device,
        tiers: Tiers,
        weights: Weights,
        layouts: Layouts,
        slots: Sequence[Slot] = (),
        *,
        expander: Expander | None = None,
        read_ahead: bool = True,
    ) -> None:
        """``layouts`` keep the weights' files open, and are closed with the store. ``slots`` are what weights that are
        not resident pass through, in the ledgers already; ``expander`` is for quantised ones."""
        self._device, self._tiers = device, tiers
        self._expander, self._read_ahead = expander, read_ahead
        self.slots: Sequence[Slot] = ()
        self._ring: Ring[Unit] | None = None
        self._weights: Weights | None = None
        self._serve(weights, layouts, slots)

    @property
    def weights(self) -> Weights:
        """What is held; there must be something."""
        assert self._weights is not None, "a model that is parked serves nothing"
        return self._weights

    def exchange(self, weights: Weights, layouts: Layouts, slots: Sequence[Slot] = ()) -> None:
        """Serve others from the next sweep on. What only those before had, slots too, leaves the ledgers."""
        used = {id(slot) for slot in slots}
        before, unused = self._weights, [slot for slot in self.slots if id(slot) not in used]
        self.close()
        self._serve(weights, layouts, slots)
        self._release(before, weights, unused)

    def drop(self) -> None:
        """Hold nothing, until the next ``exchange``."""
        before, unused = self._weights, list(self.slots)
        self.close()
        self._weights, self._ring, self.slots = None, None, ()
        self._release(before, None, unused)

    @property
    def embedding(self) -> Embedding:
        return self.weights.embedding

    @property
    def head_rows(self) -> list[range]:
        return self.weights.head_rows

    @property
    def before_head(self) -> HeadWeights:
        """What the last states pass before the LM head."""
        return head_weights(cast(Mapping[str, Tensor], self.weights.small[Unit("head")].tensors))

    def expect(self, layers: range, head: bool) -> None:
        """A sweep through ``layers`` begins; ``head`` tells whether it will want logits. Reading ahead follows that."""
        if self._ring:
            self._ring.expect(self._streamed(layers, head), self._order)

    @contextmanager
    def attention(self, layer: int, rows: int) -> Iterator[AttentionWeights]:
        """The attention weights of a layer, for a sweep of ``rows``, for as long as the context is open."""
        unit = Unit("attention", layer)
        with self._open(unit, rows) as matrices:
            yield attention_weights(self._small(unit), matrices)

    @contextmanager
    def mlp(self, layer: int, rows: int) -> Iterator[MlpWeights]:
        """The MLP weights of a layer, likewise."""
        unit = Unit("mlp", layer)
        with self._open(unit, rows) as matrices:
            yield mlp_weights(self._small(unit), matrices)

    @contextmanager
    def head(self, piece: int, rows: int) -> Iterator[Matrix]:
        """Rows ``head_rows[piece]`` of the LM head [rows of it, H], likewise."""
        with self._open(Unit("head", piece), rows) as matrices:
            yield matrices["lm_head.weight"]

    def close(self) -> None:
        """Stop reading ahead, and close the files."""
        if self._ring:
            self._ring.close()
        self._layouts.close()

    def give(self, slots: Sequence[Slot]) -> None:
        """Strike slots out of the ledgers that were taken for weights which are not served after all."""
        give_slots(self._tiers, list(slots))

    def _release(self, before: Weights | None, now: Weights | None, unused: list[Slot]) -> None:
        if before is not None:
            before.release(self._tiers, but=now)
        give_slots(self._tiers, unused)

    def _serve(self, weights: Weights, layouts: Layouts, slots: Sequence[Slot]) -> None:
        self._weights, self._layouts, self.slots = weights, layouts, slots
        self._order = self._streamed(range(weights.n_layers), head=True)
        workers = self._device.storage.workers() if self._order else None
        self._ring = Ring(slots, self._recipe, workers, ahead=self._read_ahead) if workers else None

    def _recipe(self, unit: Unit) -> Recipe:
        layout = self.weights.matrices[unit].streamed
        assert layout is not None, "in the ring's order"
        return layout.recipe

    def _small(self, unit: Unit) -> Mapping[str, Tensor]:
        return cast(Mapping[str, Tensor], self.weights.small[unit].tensors)

    @contextmanager
    def _open(self, unit: Unit, rows: int) -> Iterator[Mapping[str, Matrix]]:
        part = self.weights.matrices[unit]
        if part.streamed is None or self._ring is None:
            yield self._ready(part.tensors, rows)
            return
        slot = self._ring.acquire(unit)
        try:
            yield self._ready(part.streamed.views(slot.content), rows)
        finally:
            self._ring.release(unit)

    def _ready(self, matrices: Mapping[str, Tensor | QuantisedMatrix], rows: int) -> Mapping[str, Matrix]:
        if self._expander:
            return self._expander.ready(matrices, rows)
        return cast(Mapping[str, Matrix], matrices)  # without quantisation there are only tensors

    def _streamed(self, layers: range, head: bool) -> list[Unit]:
        """What of the layers is not resident, in the order in which it is visited."""
        visited = [Unit(kind, layer) for layer in layers for kind in ("attention", "mlp")]
        if head:
            visited += [Unit("head", piece) for piece in range(len(self.head_rows))]
        return [unit for unit in visited if self.weights.matrices[unit].streamed is not None]
