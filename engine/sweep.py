"""A sweep: a set of sequences goes through a range of layers once. All work of the engine is sweeps.

One row of a sequence is a decode step, many are a prefill chunk. Where hidden states come from is the sweep's
source, what becomes of them its sink; so prefill, decode, catch-up after a change of depth, verification of a
draft and a pipeline stage's share differ only in these fields.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .batch import Batch, Share
from .block import normalise
from .device import Device
from .embedding import Embedding
from .spec import ModelSpec
from .weight_store import WeightStore


class Source(Protocol):
    """Gives the hidden states [R, H] that enter the first layer of a sweep."""

    def __call__(self, batch: Batch) -> Tensor: ...


class Sink(Protocol):
    """Takes the hidden states [R, H] that leave the last layer of a sweep; what it returns is the sweep's result."""

    def __call__(self, batch: Batch, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Sweep:
    number: int
    layers: range
    shares: Seq[Share]
    source: Source
    sink: Sink


@dataclass(frozen=True, slots=True)
class EmbedTokens:
    """Source: the embeddings of the sweep's tokens (and positions, where they are learned)."""

    embedding: Embedding

    def __call__(self, batch: Batch) -> Tensor:
        return self.embedding(batch.token_ids, batch.positions)


@dataclass(frozen=True, slots=True)
class ExitHead:
    """Sink: final norm and LM head on the rows whose logits are wanted. Returns logits [wanted rows, V]."""

    spec: ModelSpec
    device: Device
    weights: WeightStore

    def __call__(self, batch: Batch, hidden: Tensor) -> Tensor:
        if batch.logit_index is not None:
            hidden = hidden.index_select(0, batch.logit_index)
        hidden = normalise(self.spec, self.weights.final_norm, hidden)
        if len(hidden) == 0:
            return hidden.new_empty(0, self.spec.vocab_size)
        pieces = self.weights.head_rows
        if len(pieces) == 1:
            with self.weights.head(0, len(hidden)) as matrix:
                return self.device.linear(hidden, matrix)
        logits = hidden.new_empty(len(hidden), self.spec.vocab_size)
        for i, rows in enumerate(pieces):
            with self.weights.head(i, len(hidden)) as matrix:
                logits[:, rows.start : rows.stop] = self.device.linear(hidden, matrix)
        return logits
