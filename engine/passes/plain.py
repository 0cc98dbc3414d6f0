"""One sweep through all layers up to the depth that is served, and one head."""

from collections.abc import Sequence as Seq
from dataclasses import replace

from torch import Tensor
from torch.profiler import record_function

from ..batch import Share
from ..errors import HeliosError
from ..executor import Executor
from ..request import SamplingParams, Token
from ..sampling import Sampler, SamplingRow
from ..sequence import Sequence
from ..sweep import ExitHead, Source, Sweep
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
    ) -> None:
        """``depth`` are the layers of the trunk, without an exit's own; less confidence than ``threshold``, or than a
        request's own, is a breach. It is None for a model that is whole."""
        self._executor, self.layers = executor, layers
        self._source, self._sink = source, sink
        self._sampler, self._depth, self._threshold = sampler, depth, threshold
        self.ahead, self.stats = 0, PassStats()

    def check(self, params: SamplingParams) -> None:
        check_depth(params, [self._depth])
        if self._threshold is None:
            refuse_threshold(params)

    def run(self, number: int, shares: Seq[Share]) -> list[Said]:
        logits = self._executor.run(Sweep(number, self.layers, shares, self._source, self._sink, self._sink.taps))
        asking = [share.sequence for share in shares if share.logit_rows]
        found = sample(self._sampler, logits, [sampling_row(sequence) for sequence in asking])
        self._sink.chosen([token.id if isinstance(token, Token) else None for token in found])
        return [self._said(sequence, token) for sequence, token in zip(asking, found, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        return

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
