"""The executor: takes a sweep's sequences through its layers. The only loop over layers there is."""

import torch
from torch import Tensor

from .batch import BatchBuilder
from .block import DecoderBlock
from .sweep import Sweep
from .weights import LayerSource


class Executor:
    """Runs sweeps of one model on one device."""

    def __init__(self, block: DecoderBlock, layers: LayerSource, batches: BatchBuilder) -> None:
        self.block = block
        self.layers = layers
        self.batches = batches

    @torch.inference_mode()
    def run(self, sweep: Sweep) -> Tensor:
        """Do the sweep and return what its sink made of it. The sequences' KV then reaches their share's end."""
        batch = self.batches.build(sweep.shares, sweep.layers)
        hidden = sweep.source(batch)
        for layer in sweep.layers:
            weights = self.layers.acquire(layer)
            try:
                hidden = self.block(weights, hidden, batch, layer)
            finally:
                self.layers.release(layer)
        result = sweep.sink(batch, hidden)
        for share in sweep.shares:
            share.sequence.kv.set(sweep.layers, share.start + share.count)
        return result
