"""Per-token early exit (EE-LLM, as HELIOS section 2 describes it): every token leaves at the first exit that is sure.

All layers are in memory. A token that leaves has no K and V in the layers above; its state is kept, and goes on
together with the next token of its sequence that passes the exit, so K and V are as if nothing had ever left.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from ..batch import Share
from ..errors import HeliosError
from ..request import SamplingParams, Token
from ..sampling import Sampler
from ..sequence import Sequence
from ..sweep import ExitHead
from .base import PassStats, Said, check_depth, sampling_row
from .check import Check
from .plain import sample
from .trunk import Trunk


class EarlyExitPass:
    """One step: every sequence goes from exit to exit until it is sure; at each, the others go on without those that
    left."""

    def __init__(
        self,
        trunk: Trunk,
        checks: Mapping[int, Check],
        last: ExitHead,
        sampler: Sampler,
        thresholds: Mapping[int, float | None],
    ) -> None:
        """``checks`` and ``thresholds`` are by the exit's layer; a threshold None means that no token leaves there of
        its own."""
        self._trunk, self._checks, self._last, self._sampler = trunk, checks, last, sampler
        self._thresholds = thresholds
        self.layers = trunk.segments[0]
        self.ahead, self.stats = 0, PassStats(rows=trunk.rows)

    def check(self, params: SamplingParams) -> None:
        check_depth(params, [*self._checks, self._trunk.segments[-1].stop])

    def run(self, number: int, shares: Seq[Share]) -> list[Said]:
        try:
            return self._run(number, shares)
        except HeliosError:
            for share in shares:  # whoever has no token begins again at the first layer
                share.sequence.kv.cut(share.start)
            raise

    def forget(self, sequence: Sequence) -> None:
        self._trunk.forget(sequence)

    def _run(self, number: int, shares: Seq[Share]) -> list[Said]:
        said: list[Said] = []
        going = [share.sequence for share in shares if share.logit_rows]
        for segment, layers in enumerate(self._trunk.segments):
            if segment > 0:
                shares = [_due(sequence, layers) for sequence in going]
            check = self._checks.get(layers.stop)
            least = [self._least(share.sequence, layers.stop) if share.logit_rows else None for share in shares]
            asked = [replace(s, logit_rows=int(th is not None)) for s, th in zip(shares, least, strict=True)]
            if check:
                check.thresholds = [threshold for threshold in least if threshold is not None]
            logits = self._trunk.run(number, segment, asked, check or self._last)
            asking = [share.sequence for share in asked if share.logit_rows]
            leaving = [s for s, leaves in zip(asking, check.leaving, strict=True) if leaves] if check else asking
            found = sample(self._sampler, logits, [sampling_row(sequence) for sequence in leaving])
            said += [self._said(sequence, token, layers.stop) for sequence, token in zip(leaving, found, strict=True)]
            left = {id(sequence) for sequence in leaving}
            going = [sequence for sequence in going if id(sequence) not in left]
            if not going:
                break
        return said

    def _least(self, sequence: Sequence, layer: int) -> float | None:
        """Confidence that a sequence must have to leave after so many layers; None if it does not leave there."""
        if layer not in self._checks:
            return 0.0  # the last layer
        params = sequence.params
        if params.depth is not None:
            return 0.0 if params.depth == layer else None
        return self._thresholds[layer] if params.exit_threshold is None else params.exit_threshold

    def _said(self, sequence: Sequence, token: Token | HeliosError, layer: int) -> Said:
        if isinstance(token, HeliosError):
            return Said(sequence, error=token)
        params, breached = sequence.params, False
        if params.depth is not None and layer in self._checks:
            least = self._thresholds[layer] if params.exit_threshold is None else params.exit_threshold
            breached = token.confidence < (least or 0.0)
        return Said(sequence, (replace(token, depth=layer, breached=breached),))


def _due(sequence: Sequence, layers: range) -> Share:
    """The rows that a sequence's last token needs in further layers: those that left before it, and its own."""
    start = sequence.kv.of(layers)
    return Share(sequence, start, len(sequence.tokens) - start, 1)
