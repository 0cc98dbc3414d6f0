"""A batch: the index tensors of one sweep, made once and used by every layer."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from .attention import AttentionGroup, AttentionPlanner, Span
from .device import Device
from .kv import BLOCK
from .rope import Rope
from .sequence import Sequence
from .spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Share:
    """What one sequence does in a sweep: positions ``[start, start + count)``."""

    sequence: Sequence
    start: int
    count: int
    logit_rows: int = 0
    """Of the last so many positions the logits are wanted: 0 in mid-prompt, 1 to sample, all to score."""


@dataclass(frozen=True, slots=True)
class Batch:
    """R rows: one row of each decoding sequence, by rising length, then the chunks."""

    token_ids: Tensor  # [R]
    positions: Tensor  # [R]
    kv_rows: Tensor  # [R * 2 * n_kv], where each row's K and V go
    attention: dict[int | None, list[AttentionGroup]]
    """Attention groups by sliding window; None is full attention."""
    angles: tuple[Tensor, Tensor] | None
    """cos and signed sin [R, 1, head_dim]; None where positions are learned."""
    logit_index: Tensor | None
    """Rows whose logits are wanted, in the order of the sweep's shares; None for all rows in order."""


class BatchBuilder:
    """Makes the batches of one engine."""

    def __init__(self, spec: ModelSpec, planner: AttentionPlanner, rope: Rope | None, device: Device) -> None:
        self.spec = spec
        self.planner = planner
        self.rope = rope
        self.device = device

    def build(self, shares: Seq[Share], layers: range) -> Batch:
        """The batch of a sweep over ``layers``. The sequences own the blocks that the positions need."""
        order = sorted(range(len(shares)), key=lambda i: (shares[i].count > 1, shares[i].start))
        spans: dict[int, Span] = {}
        row = 0
        for i in order:
            share = shares[i]
            spans[i] = Span(row, share.start, share.count, share.sequence.blocks)
            row += share.count
        placed = [spans[i] for i in order]
        positions = np.concatenate([np.arange(s.start, s.length) for s in placed])
        blocks = np.concatenate([np.take(s.blocks, np.arange(s.start, s.length) // BLOCK) for s in placed])
        tokens = [t for i in order for t in shares[i].sequence.tokens[spans[i].start : spans[i].length]]
        wanted = [
            np.arange(spans[i].row + s.count - s.logit_rows, spans[i].row + s.count) for i, s in enumerate(shares)
        ]
        logit_rows = np.concatenate(wanted)
        every = len(logit_rows) == row and bool((logit_rows == np.arange(row)).all())
        positions_tensor = self.device.index(positions)
        decodes, chunks = [s for s in placed if s.count == 1], [s for s in placed if s.count > 1]
        windows = set(self.spec.windows[layers.start : layers.stop])
        return Batch(
            token_ids=self.device.index(np.array(tokens, dtype=np.int64)),
            positions=positions_tensor,
            kv_rows=self.device.index(self.planner.kv.write_rows(blocks, positions)),
            attention={window: self.planner.plan(decodes, chunks, window) for window in windows},
            angles=self.rope.angles(positions_tensor, self.device.dtype) if self.rope else None,
            logit_index=None if every else self.device.index(logit_rows),
        )
