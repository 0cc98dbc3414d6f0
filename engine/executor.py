"""The executor: takes a sweep's sequences through its layers. The only loop over layers there is."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .batch import Batch, BatchBuilder, Tile
from .block import DecoderBlock
from .sweep import Sweep
from .weight_store import WeightStore


class Executor:
    """Runs sweeps of one model on one device."""

    def __init__(self, block: DecoderBlock, weights: WeightStore, batches: BatchBuilder) -> None:
        self.block = block
        self.weights = weights
        self.batches = batches

    @torch.inference_mode()
    def run(self, sweep: Sweep) -> Tensor:
        """Do the sweep and return what its sink made of it. The sequences' KV then reaches their share's end."""
        self.weights.expect(sweep.layers, head=any(share.logit_rows for share in sweep.shares))
        batch = self.batches.build(sweep.shares, sweep.layers)
        hidden, rows = sweep.source(batch), len(batch.token_ids)
        for layer in sweep.layers:
            with self.weights.attention(layer, rows) as attention:
                hidden = _by_tiles(batch, hidden, partial(self.block.attention, attention, layer))
            with self.weights.mlp(layer, rows) as mlp:
                hidden = _by_tiles(batch, hidden, partial(self.block.mlp, mlp))
        result = sweep.sink(batch, hidden)
        for share in sweep.shares:
            share.sequence.kv.set(sweep.layers, share.start + share.count)
        return result


def _by_tiles(batch: Batch, hidden: Tensor, step: Callable[[Tile, Tensor], Tensor]) -> Tensor:
    """``step`` on the hidden states [R, H] of each tile; its result takes their place."""
    if len(batch.tiles) == 1:
        return step(batch.tiles[0], hidden)
    for tile in batch.tiles:
        hidden[tile.rows] = step(tile, hidden[tile.rows])
    return hidden
