"""The executor: takes a sweep's sequences through its layers. The only loop over layers there is."""

import torch
from torch import Tensor

from .batch import BatchBuilder
from .block import decoder_block
from .kv import KVCache
from .spec import ModelSpec
from .sweep import Sweep
from .weights import LayerSource


class Executor:
    """Runs sweeps of one model on one device."""

    def __init__(
        self, spec: ModelSpec, layers: LayerSource, kv: KVCache, batches: BatchBuilder, scratch: Tensor
    ) -> None:
        """``scratch`` is a flat workspace of ``AttentionPlanner.scratch_elements``."""
        self.spec = spec
        self.layers = layers
        self.kv = kv
        self.batches = batches
        self.scratch = scratch

    @torch.inference_mode()
    def run(self, sweep: Sweep) -> Tensor:
        """Do the sweep and return what its sink made of it. The sequences' KV then reaches their share's end."""
        batch = self.batches.build(sweep.shares, sweep.layers)
        hidden = sweep.source(batch)
        for layer in sweep.layers:
            weights = self.layers.acquire(layer)
            try:
                hidden = decoder_block(self.spec, weights, hidden, batch, self.kv, layer, self.scratch)
            finally:
                self.layers.release(layer)
        result = sweep.sink(batch, hidden)
        for share in sweep.shares:
            share.sequence.kv.set(sweep.layers, share.start + share.count)
        return result
