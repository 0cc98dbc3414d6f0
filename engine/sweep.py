"""A sweep: a set of sequences goes through a range of layers once. All work of the engine is sweeps.

One row of a sequence is a decode step, many are a prefill chunk. Where hidden states come from is the sweep's
source, what becomes of them its sink; so prefill, decode, catch-up after a change of depth, verification of a
draft and a pipeline stage's share differ only in these fields.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .batch import Batch, Share, Tile
from .block import before_head
from .device import Device
from .embedding import Embedding
from .spec import ModelSpec
from .weight_store import WeightStore
from .weights import HeadWeights


class Source(Protocol):
    """Gives the hidden states that enter the first layer of a sweep."""

    def __call__(self, batch: Batch, tile: Tile) -> Tensor:
        """Those of a tile, [rows, H]."""
        ...


class Sink(Protocol):
    """Takes the hidden states that leave the last layer of a sweep."""

    def take(self, tile: Tile, hidden: Tensor) -> None:
        """Those of a tile, [rows, H], on loan: the next tile's may lie in the same memory. Tiles come in order."""
        ...

    def result(self, batch: Batch) -> Tensor:
        """What became of all tiles: the sweep's result."""
        ...


@dataclass(frozen=True, slots=True)
class Sweep:
    number: int
    layers: range
    shares: Seq[Share]
    source: Source
    sink: Sink
    taps: Mapping[int, Sink] = field(default_factory=dict)
    """Sinks for the hidden states that leave layers on the way, by the number of layers below."""


@dataclass(frozen=True, slots=True)
class EmbedTokens:
    """Source: the embeddings of the sweep's tokens (and positions, where they are learned)."""

    embedding: Embedding

    def __call__(self, batch: Batch, tile: Tile) -> Tensor:
        return self.embedding(batch.token_ids[tile.rows], batch.positions[tile.rows])


class ExitHead:
    """Sink: final norm, an exit's adapter if it has one, and LM head on the rows whose logits are wanted.

    Gives logits [wanted rows, V].
    """

    taps: Mapping[int, Sink] = {}
    """Further sinks that it has on the way."""

    def __init__(
        self, spec: ModelSpec, device: Device, weights: WeightStore, before: HeadWeights | None = None
    ) -> None:
        """``before`` is what there is of an exit's head before the LM head; None is the model's own."""
        self._spec, self._device, self._weights = spec, device, weights
        self._before = before or weights.before_head
        self._wanted = Wanted()

    def take(self, tile: Tile, hidden: Tensor) -> None:
        self._wanted.take(tile, hidden)

    def result(self, batch: Batch) -> Tensor:
        return self.logits(self.ready(batch))

    def ready(self, batch: Batch) -> Tensor:
        """The states [wanted rows, H] as the LM head wants them."""
        return before_head(self._spec, self._before, self._wanted.result(batch))

    def chosen(self, ids: Seq[int | None]) -> None:
        """The tokens that were chosen by the logits; None where there is none."""

    def logits(self, hidden: Tensor) -> Tensor:
        """The LM head's product with states [N, H] that are ready for it: [N, V]."""
        if len(hidden) == 0:
            return hidden.new_empty(0, self._spec.vocab_size)
        pieces = self._weights.head_rows
        if len(pieces) == 1:
            with self._weights.head(0, len(hidden)) as matrix:
                return self._device.linear(hidden, matrix)
        logits = hidden.new_empty(len(hidden), self._spec.vocab_size)
        for i, rows in enumerate(pieces):
            with self._weights.head(i, len(hidden)) as matrix:
                logits[:, rows.start : rows.stop] = self._device.linear(hidden, matrix)
        return logits


class Nothing:
    """Sink for states that nobody wants: their K and V are stored."""

    def take(self, tile: Tile, hidden: Tensor) -> None:
        return

    def result(self, batch: Batch) -> Tensor:
        """None."""
        return torch.empty(0)


class Wanted:
    """Sink: the states [wanted rows, H] whose logits are wanted, in the order of the sweep's shares."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    def take(self, tile: Tile, hidden: Tensor) -> None:
        self._rows.append(hidden.clone() if tile.wanted is None else hidden.index_select(0, tile.wanted))

    def result(self, batch: Batch) -> Tensor:
        rows = self._rows[0] if len(self._rows) == 1 else torch.cat(self._rows)
        self._rows = []
        return rows if batch.logit_order is None else rows.index_select(0, batch.logit_order)
