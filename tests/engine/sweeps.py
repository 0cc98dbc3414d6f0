"""Sweeps driven by hand, to look at logits the way no request can."""

from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from torch import Tensor

from engine.batch import Share
from engine.build import Parts, build
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv import blocks_for
from engine.passes.choose import sink, source
from engine.request import Request
from engine.sequence import Sequence
from engine.sweep import Sweep


class Bench:
    """An engine's parts with sequences placed by hand. Computes in float32 unless told otherwise."""

    def __init__(self, model: Path, dtype: str = "float32", **config: int) -> None:
        self.parts: Parts = build(EngineConfig(model=str(model), dtype=dtype, **config))
        self.engine = Engine(self.parts)
        self._count = 0

    def sequence(self, tokens: Seq[int]) -> Sequence:
        """A sequence with blocks for ``tokens`` and no KV yet."""
        self._count += 1
        sequence = self.engine.prepare(Request(str(self._count), tuple(tokens)), lambda _: None)
        sequence.home = self.parts.homes[0]
        sequence.blocks = sequence.home.pool.take(blocks_for(len(tokens)))
        return sequence

    def sweep(self, shares: Seq[tuple[Sequence, int]]) -> list[Tensor]:
        """Each sequence's next ``count`` positions in one sweep; the logits [count, V] of each, as float32."""
        layers = range(self.parts.spec.n_layers)
        made = [Share(s, s.kv.of(layers), count, logit_rows=count) for s, count in shares]
        logits = self.parts.executor.run(Sweep(0, layers, made, source(self.parts), sink(self.parts)))
        return [part.float() for part in logits.split([count for _, count in shares])]

    def logits(self, tokens: Seq[int], chunk: int | None = None) -> Tensor:
        """Logits [len(tokens), V] of one sequence, prefilled ``chunk`` positions at a time."""
        sequence = self.sequence(tokens)
        parts, left = [], len(tokens)
        while left:
            count = min(chunk or left, left)
            parts += self.sweep([(sequence, count)])
            left -= count
        self.parts.homes[0].pool.give_back(sequence.blocks)
        return torch.cat(parts)
