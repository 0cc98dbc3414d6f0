"""From a sweep's logits to its tokens: confidence and log-probabilities of the raw logits, then the choice.

Logits are searched as few times as the rows at hand allow, since a row is as wide as the vocabulary: one softmax and
two maxima for greedy rows; a draw at temperature 1 without filters reuses the softmax; only rows that need a
temperature, a ranking or a penalty pay for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import HeliosError
from ..request import SamplingParams, Token
from . import penalties
from .draw import FIRST_WIDTH, SLACK, Filters, draw_ranked, draw_unranked, is_ranked
from .scratch import Scratch
from .uniform import uniform
from .wide import argmax, candidates

MAX_ROWS = 32
"""Rows sampled at once unless told otherwise; larger batches are cut."""
SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Below it float32 has no reciprocal; the draw is among the likeliest alone long before."""


@dataclass(slots=True)
class SamplingRow:
    """What the choice of one row's token depends on. Lists are read, not kept."""

    params: SamplingParams
    """Validated. ``seed`` is set unless the row is greedy."""
    position: int
    """Index of the token to be chosen in prompt + output; with the seed it determines the draw."""
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    banned_ids: Sequence[int] = ()
    """Never chosen: end-of-sequence and stop tokens while the output is shorter than ``min_tokens``."""


class Sampler:
    """Chooses one token per row. A row's token depends on its own logits and its ``SamplingRow`` alone.

    Not for two threads at once: it works in buffers of its own.
    """

    def __init__(
        self, vocab_size: int, device: torch.device | str, max_rows: int = MAX_ROWS, *, margin: bool = False
    ) -> None:
        """``max_rows`` are sampled at once; it bounds the workspace. ``margin`` reports the lead over the second best
        as confidence."""
        self._margin = margin
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._scratch = Scratch(vocab_size, max_rows, self.device)

    @property
    def workspace_bytes(self) -> int:
        """Most that this sampler keeps on its device between calls."""
        return self._scratch.max_bytes

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[Token]:
        """The next token of each row from ``logits`` [R, V] of any floating type. ``logits`` is not changed.

        Raises HeliosError when a row's logits are not finite, ValueError when shapes do not match or a seed is missing.
        """
        if logits.shape != (len(rows), self.vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}; expected ({len(rows)}, {self.vocab_size})")
        tokens: list[Token] = []
        for first in range(0, len(rows), self._scratch.max_rows):
            part = slice(first, first + self._scratch.max_rows)
            tokens += self._sample(logits[part], rows[part], first)
        return tokens

    def _sample(self, logits: Tensor, rows: Sequence[SamplingRow], first: int) -> list[Token]:
        """``sample`` for at most ``max_rows`` rows, the ``first`` of which has that number in the whole batch."""
        raw = self._scratch.load(logits)  # [R, W]
        best = argmax(raw)  # [R]
        probability = self._softmax(raw)  # [R, W]
        confidence = probability.gather(1, best[:, None])  # [R, 1]
        _check_finite(confidence, first)
        # The largest probability is 1 / sum(exp(raw - largest)), so the normaliser costs no further pass.
        log_sum = raw.gather(1, best[:, None]) - confidence.log()  # [R, 1]
        top = self._top_logprobs(raw, log_sum, rows)
        sure = self._lead(probability, best, confidence) if self._margin else confidence
        chosen = self._choose(raw, best, probability, confidence, rows)  # [R]
        logprob = raw.gather(1, chosen[:, None]) - log_sum  # [R, 1]
        # One transfer for all three; float32 is exact for token ids, which are below 2^24.
        table = torch.cat((chosen[:, None].float(), logprob, sure), 1).tolist()
        return [Token(int(t), p, c, top.get(i, ())) for i, (t, p, c) in enumerate(table)]

    @staticmethod
    def _lead(probability: Tensor, best: Tensor, largest: Tensor) -> Tensor:
        """The largest probability less the second largest, [R, 1]."""
        second = probability.scatter_(1, best[:, None], 0).amax(-1, keepdim=True)
        probability.scatter_(1, best[:, None], largest)
        return largest - second

    def _choose(
        self, raw: Tensor, best: Tensor, probability: Tensor, confidence: Tensor, rows: Sequence[SamplingRow]
    ) -> Tensor:
        """Token ids [R]. ``best``, ``probability`` and ``confidence`` are those of the raw logits."""
        adjusted = [i for i, row in enumerate(rows) if penalties.changes_logits(row.params, row.banned_ids)]
        sampled = [i for i, row in enumerate(rows) if row.params.temperature > 0]
        if not adjusted and not sampled:
            return best
        logits, chosen = raw, best.clone()
        if adjusted:
            logits = self._adjust(raw, rows, adjusted)
            chosen[adjusted] = argmax(self._scratch.pick(logits, adjusted))
        # Rows whose distribution is still the raw one.
        plain = {i for i in sampled if rows[i].params.temperature == 1.0}.difference(adjusted)
        unranked = [i for i in sampled if not is_ranked(rows[i].params)]
        if unranked:
            reuse = plain.issuperset(unranked)
            weights = self._scratch.pick(probability, unranked) if reuse else self._tempered(logits, rows, unranked)
            uniforms = self._column([_uniform(rows[i]) for i in unranked])[:, 0]
            chosen[unranked] = draw_unranked(weights, [rows[i].params.min_p for i in unranked], uniforms)
        ranked = [i for i in sampled if is_ranked(rows[i].params)]
        if ranked:
            mass = 1.0 / confidence.double()  # [R, 1]
            open_ended = [i for i in ranked if i not in plain and rows[i].params.top_k == 0]
            if open_ended:
                mass[open_ended] = 1.0 / self._tempered(logits, rows, open_ended).amax(-1, keepdim=True).double()
            chosen[ranked] = self._draw_ranked(logits, mass, rows, ranked)
        return chosen

    def _adjust(self, raw: Tensor, rows: Sequence[SamplingRow], index: list[int]) -> Tensor:
        """A copy of the logits [R, W] with bias, penalties and bans applied to the rows of ``index``."""
        logits = self._scratch.rows("adjusted", len(raw)).copy_(raw)
        for i in index:
            row = rows[i]
            penalties.apply(logits[i], row.params, row.prompt_ids, row.output_ids, row.banned_ids)
        return logits

    def _draw_ranked(self, logits: Tensor, mass: Tensor, rows: Sequence[SamplingRow], index: list[int]) -> Tensor:
        params = [rows[i].params for i in index]
        filters = Filters(
            temperature=self._column([p.temperature for p in params]),
            top_k=torch.tensor([min(p.top_k, self._scratch.width) for p in params], device=self.device)[:, None],
            top_p=self._column([p.top_p for p in params]),
            min_p=self._column([p.min_p for p in params]),
            uniform=self._column([_uniform(rows[i]) for i in index]),
            mass=mass[index],
        )
        width = max(p.top_k + SLACK if p.top_k else FIRST_WIDTH for p in params)
        return draw_ranked(self._scratch.pick(logits, index), filters, width)

    def _tempered(self, logits: Tensor, rows: Sequence[SamplingRow], index: list[int]) -> Tensor:
        """Probabilities [len(index), W] of the rows of ``index`` at their temperatures. Overwrites the raw ones."""
        picked = self._scratch.pick(logits, index)
        scaled = self._scratch.rows("scaled", len(index))
        # The largest becomes 0 before the division, which a tiny temperature would otherwise overflow.
        torch.sub(picked, picked.amax(-1, keepdim=True), out=scaled)
        temperatures = [max(rows[i].params.temperature, SMALLEST_TEMPERATURE) for i in index]
        scaled /= self._column(temperatures).float()  # a float64 divisor would take a path ten times slower
        return self._softmax(scaled)

    def _softmax(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1, out=self._scratch.rows("probability", len(x)))

    def _top_logprobs(
        self, raw: Tensor, log_sum: Tensor, rows: Sequence[SamplingRow]
    ) -> dict[int, tuple[tuple[int, float], ...]]:
        """The likeliest tokens of the rows that ask for them, from the raw logits."""
        asking = [i for i, row in enumerate(rows) if row.params.logprobs]
        if not asking:
            return {}
        counts = [min(rows[i].params.logprobs or 0, self.vocab_size) for i in asking]
        width = min(max(counts) + SLACK, self._scratch.width)  # so that equals come in order of their ids
        values, ids = candidates(self._scratch.pick(raw, asking), width)
        values -= log_sum[asking]
        pairs = zip(asking, counts, ids.tolist(), values.tolist(), strict=True)
        return {i: tuple(zip(ids[:count], values[:count], strict=True)) for i, count, ids, values in pairs}

    def _column(self, numbers: list[float]) -> Tensor:
        """[R] numbers as a float64 column [R, 1]."""
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)[:, None]


def _uniform(row: SamplingRow) -> float:
    if row.params.seed is None:
        raise ValueError("seed is None on a sampled row; whoever begins the stream must pick one")
    return uniform(row.params.seed, row.position)


def _check_finite(confidence: Tensor, first: int) -> None:
    """Refuse logits with NaN or infinity, which make a row's softmax NaN; ``first`` is the number of the first row."""
    finite = confidence.isfinite()
    if not finite.all():
        row = first + int((~finite).nonzero()[0, 0])
        raise HeliosError(
            f"the logits of row {row} are not finite; the checkpoint is damaged or its numbers "
            "exceed the dtype: try bfloat16 or float32"
        )
