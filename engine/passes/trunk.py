"""A model's layers in segments that end at exits, with the states between them kept: a position may stop at an exit and
be taken on from there by a later sweep, without going through the layers below again."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from torch import Tensor

from ..batch import Share
from ..boundary import BoundaryStates
from ..executor import Executor
from ..sequence import Sequence
from ..sweep import Nothing, Sink, Source, Sweep


class Trunk:
    """Sweeps through the segments of one model. Segment ``i`` is ``segments[i]``, a range of layers."""

    def __init__(
        self,
        executor: Executor,
        embed: Source,
        kept: Mapping[int, BoundaryStates],
        n_layers: int,
        max_rows: int,
        tile_rows: int,
    ) -> None:
        """``kept`` are stores for the states that leave so many layers; a sweep has ``max_rows`` rows at most, a
        sequence ``tile_rows`` of them."""
        self._executor, self._embed, self._kept = executor, embed, kept
        self._max_rows, self._tile_rows = max_rows, tile_rows
        starts, ends = [0, *sorted(kept)], [*sorted(kept), n_layers]
        self.segments = tuple(range(start, end) for start, end in zip(starts, ends, strict=True))
        self.rows = [0] * len(self.segments)
        """Computed so far, by segment."""

    def run(self, number: int, segment: int, shares: Seq[Share], sink: Sink | None) -> Tensor:
        """Take shares through a segment; what ``sink`` makes of the rows whose logits are wanted, in order.

        States that leave at a boundary are kept. A share may have more rows than a sweep: what is behind is then caught
        up with first. Raises as ``Executor.run``; the KV of the segment tells how far each sequence has come.
        """
        for part in self._behind(shares):
            self._sweep(number, segment, part, None)
        layers = self.segments[segment]
        last = [_from(share, share.sequence.kv.of(layers)) for share in shares]
        return self._sweep(number, segment, last, sink)

    def forget(self, sequence: Sequence) -> None:
        """Give back what is kept of a sequence."""
        for store in self._kept.values():
            store.forget(sequence)

    def _sweep(self, number: int, segment: int, shares: Seq[Share], sink: Sink | None) -> Tensor:
        self.rows[segment] += sum(share.count for share in shares)
        layers = self.segments[segment]
        source = self._kept[layers.start] if layers.start else self._embed
        store = self._kept.get(layers.stop)
        if sink is None:
            return self._executor.run(Sweep(number, layers, shares, source, store or Nothing()))
        taps = {layers.stop: store} if store else {}
        return self._executor.run(Sweep(number, layers, shares, source, sink, taps))

    def _behind(self, shares: Seq[Share]) -> Iterator[list[Share]]:
        """Sweeps' worth of leading rows, until what is left of all shares fits one sweep."""
        left = [replace(share, logit_rows=0) for share in shares]
        while True:
            over = sum(share.count for share in left) - self._max_rows
            part: list[Share] = []
            room = self._max_rows
            for i, share in enumerate(left):
                spare = share.count - max(1, shares[i].logit_rows)
                count = min(spare, self._tile_rows, room, max(over, share.count - self._tile_rows))
                if count > 0:
                    part.append(replace(share, count=count))
                    left[i] = _from(share, share.start + count)
                    room, over = room - count, over - count
            if not part:
                return
            yield part


def _from(share: Share, start: int) -> Share:
    """What remains of a share from a position on."""
    return replace(share, start=start, count=share.start + share.count - start)
