"""The executor: takes a sweep's sequences through its layers. The only loop over layers there is."""

from functools import partial

import torch
from torch import Tensor

from .activations import Activations
from .batch import BatchBuilder
from .block import DecoderBlock
from .sweep import Sweep
from .weight_store import WeightStore

TRIM_ROWS = 256
"""Sweeps of so many rows together leave so much freed memory between blocks in use that it is given back."""


class Executor:
    """Runs sweeps of one model on one device."""

    def __init__(
        self, block: DecoderBlock, weights: WeightStore, batches: BatchBuilder, activations: Activations
    ) -> None:
        self.block = block
        self.weights = weights
        self.batches = batches
        self.activations = activations
        self._untrimmed_rows = 0

    @torch.inference_mode()
    def run(self, sweep: Sweep) -> Tensor:
        """Do the sweep and return what its sink made of it. The sequences' KV then reaches their share's end.

        Raises CohortError if the KV of some sequences could not be had, any other HeliosError if the sweep cannot be
        done at all. Nothing of the sequences has changed then.
        """
        self.weights.expect(sweep.layers, head=any(share.logit_rows for share in sweep.shares))
        batch = self.batches.build(sweep.shares, sweep.layers)
        states, rows = self.activations, len(batch.token_ids)
        states.begin(batch.tiles)
        states.step(lambda tile, _: sweep.source(batch, tile))
        for layer in sweep.layers:
            with self.weights.attention(layer, rows) as attention:
                states.step(partial(self.block.attention, attention, layer))
            with self.weights.mlp(layer, rows) as mlp:
                states.step(partial(self.block.mlp, mlp))
            if layer + 1 in sweep.taps:
                states.show(sweep.taps[layer + 1].take)
        states.end(sweep.sink.take)
        result = sweep.sink.result(batch)
        self._untrimmed_rows += rows
        if self._untrimmed_rows >= TRIM_ROWS:
            self.block.device.trim()
            self._untrimmed_rows = 0
        for share in sweep.shares:
            share.sequence.kv.set(sweep.layers, share.start + share.count)
        return result
