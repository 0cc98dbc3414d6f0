"""One sweep through all layers up to the depth that is served, and one head."""

from collections.abc import Sequence as Seq
from dataclasses import replace

from torch import Tensor
from torch.profiler import record_function

from ..batch import Share
from ..boundary import Behind, BoundaryStates
from ..errors import HeliosError
from ..executor import Executor
from ..request import SamplingParams, Token
from ..sampling import Sampler, SamplingRow
from ..sequence import Sequence
from ..sweep import ExitHead, Nothing, Source, Sweep
from .base import PassStats, Said, check_depth, refuse_threshold, sampling_row


class PlainPass:
    """Every token passes the same layers."""

    def __init__(
        self,
        executor: Executor,
        layers: range,
        source: Source,
        sink: ExitHead,
        sampler: Sampler,
        depth: int,
        threshold: float | None,
        keep: BoundaryStates | None = None,
        behind: Behind | None = None,
    ) -> None:
        """``depth`` are the layers of the trunk, without an exit's own; less confidence than ``threshold``, or than a
        request's own, is a breach. It is None for a model that is whole. ``keep`` takes the states that leave the
        trunk; ``behind`` is what sequences of before a change of depth are taken through first."""
        self._executor, self.layers = executor, layers
        self._source, self._sink = source, sink
        self._sampler, self._depth, self._threshold = sampler, depth, threshold
        self._keep, self.behind = keep, behind
        self._taps = {**sink.taps, **({depth: keep} if keep else {})}
        self.ahead, self.stats = 0, PassStats()

    def check(self, params: SamplingParams) -> None:
        check_depth(params, [self._depth])
        if self._threshold is None:
            refuse_threshold(params)

    def run(self, number: int, shares: Seq[Share]) -> list[Said]:
        shares = self._caught_up(number, shares)
        if not shares:
            return []
        logits = self._executor.run(Sweep(number, self.layers, shares, self._source, self._sink, self._taps))
        asking = [share.sequence for share in shares if share.logit_rows]
        found = sample(self._sampler, logits, [sampling_row(sequence) for sequence in asking])
        self._sink.chosen([token.id if isinstance(token, Token) else None for token in found])
        return [self._said(sequence, token) for sequence, token in zip(asking, found, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        for states in (self._keep, self.behind.states if self.behind else None):
            if states:
                states.forget(sequence)

    def _caught_up(self, number: int, shares: Seq[Share]) -> list[Share]:
        """What is left of the shares for a sweep of all layers."""
        if self.behind is None:
            return list(shares)
        layers, late, left = self.behind.layers, [], []
        for share in shares:
            end = share.start + share.count
            known = min(end, share.sequence.kv.of(range(layers.start)))
            if known > share.start:
                late.append(replace(share, count=known - share.start, logit_rows=0))
            if known < end:
                start = max(known, share.start)
                left.append(replace(share, start=start, count=end - start))
        if late:
            taps = {self._depth: self._keep} if self._keep else {}
            self._executor.run(Sweep(number, layers, late, self.behind.states, Nothing(), taps))
        return left

    def _said(self, sequence: Sequence, token: Token | HeliosError) -> Said:
        if isinstance(token, HeliosError):
            return Said(sequence, error=token)
        least = self._threshold
        if least is not None and sequence.params.exit_threshold is not None:
            least = sequence.params.exit_threshold
        breached = least is not None and token.confidence < least
        return Said(sequence, (replace(token, depth=self._depth, breached=breached),))


def sample(sampler: Sampler, logits: Tensor, rows: list[SamplingRow]) -> list[Token | HeliosError]:
    """The token of each row of logits [len(rows), V], or why there is none."""
    with record_function("helios::sample"):
        try:
            return [*sampler.sample(logits, rows)]
        except HeliosError as error:
            if len(rows) == 1:
                return [error]
            return [sample(sampler, logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]  # the others are well
