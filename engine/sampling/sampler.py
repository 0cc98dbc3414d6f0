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
from .draw import FIRST_WIDTH, SLACK, Filters, draw_ranked, draw_unranked, is_ranked, probabilities
from .uniform import uniform
from .wide import argmax, candidates, padded


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

    Working memory: about four float32 copies of the logits while ``sample`` runs, none between calls.
    """

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[Token]:
        """The next token of each row from ``logits`` [R, V] of any floating type. ``logits`` is not changed.

        Raises HeliosError when a row's logits are not finite, ValueError when shapes do not match.
        """
        if logits.shape != (len(rows), self.vocab_size):
            raise ValueError(f"logits are {tuple(logits.shape)}; expected ({len(rows)}, {self.vocab_size})")
        if not rows:
            return []
        raw = padded(logits)  # [R, W]
        best = argmax(raw)  # [R]
        probability = raw.softmax(-1)  # [R, W]
        confidence = probability.gather(1, best[:, None])  # [R, 1]
        # The largest probability is 1 / sum(exp(raw - largest)), so the normaliser costs no further pass.
        log_sum = raw.gather(1, best[:, None]) - confidence.log()  # [R, 1]
        chosen = self._choose(raw, best, probability, confidence, rows)  # [R]
        logprob = raw.gather(1, chosen[:, None]) - log_sum  # [R, 1]
        top = self._top_logprobs(raw, log_sum, rows)
        # One transfer; float64 holds token ids exactly.
        table = torch.cat((chosen[:, None].double(), logprob.double(), confidence.double()), 1).tolist()
        return [_token(i, int(t), p, c, top.get(i, ())) for i, (t, p, c) in enumerate(table)]

    def _choose(
        self, raw: Tensor, best: Tensor, probability: Tensor, confidence: Tensor, rows: Sequence[SamplingRow]
    ) -> Tensor:
        """Token ids [R]. ``best``, ``probability`` and ``confidence`` are those of the raw logits."""
        edited = [i for i, row in enumerate(rows) if penalties.changes_logits(row.params, row.banned_ids)]
        sampled = [i for i, row in enumerate(rows) if row.params.temperature > 0]
        if not edited and not sampled:
            return best
        logits, chosen = raw, best.clone()
        if edited:
            logits = raw.clone()
            for i in edited:
                row = rows[i]
                penalties.apply(logits[i], row.params, row.prompt_ids, row.output_ids, row.banned_ids)
            chosen[edited] = argmax(logits[edited])
        plain = {i for i in sampled if rows[i].params.temperature == 1.0}.difference(edited)
        ranked = [i for i in sampled if is_ranked(rows[i].params)]
        unranked = [i for i in sampled if not is_ranked(rows[i].params)]
        if unranked:
            reuse = plain.issuperset(unranked)
            p = _take(probability, unranked) if reuse else self._probabilities(logits, rows, unranked)
            uniforms = self._column([_uniform(rows[i]) for i in unranked])[:, 0]
            chosen[unranked] = draw_unranked(p, [rows[i].params.min_p for i in unranked], uniforms)
        if ranked:
            mass = 1.0 / confidence.double()  # [R, 1]
            tempered = [i for i in ranked if i not in plain and rows[i].params.top_k == 0]
            if tempered:
                peak = self._probabilities(logits, rows, tempered).amax(-1, keepdim=True)
                mass[tempered] = 1.0 / peak.double()
            chosen[ranked] = self._draw_ranked(logits, mass, rows, ranked)
        return chosen

    def _draw_ranked(self, logits: Tensor, mass: Tensor, rows: Sequence[SamplingRow], ranked: list[int]) -> Tensor:
        params = [rows[i].params for i in ranked]
        off = logits.shape[1] + 1
        filters = Filters(
            temperature=self._column([p.temperature for p in params]),
            top_k=torch.tensor([p.top_k or off for p in params], device=self.device)[:, None].clamp_(max=off),
            top_p=self._column([p.top_p for p in params]),
            min_p=self._column([p.min_p for p in params]),
            uniform=self._column([_uniform(rows[i]) for i in ranked]),
            mass=_take(mass, ranked),
        )
        width = max(p.top_k + SLACK if p.top_k else FIRST_WIDTH for p in params)
        return draw_ranked(_take(logits, ranked), filters, width)

    def _probabilities(self, logits: Tensor, rows: Sequence[SamplingRow], index: list[int]) -> Tensor:
        return probabilities(_take(logits, index), self._column([rows[i].params.temperature for i in index]))

    def _top_logprobs(
        self, raw: Tensor, log_sum: Tensor, rows: Sequence[SamplingRow]
    ) -> dict[int, tuple[tuple[int, float], ...]]:
        """The likeliest tokens of the rows that ask for them, from the raw logits."""
        asking = [i for i, row in enumerate(rows) if row.params.logprobs]
        if not asking:
            return {}
        counts = [min(rows[i].params.logprobs or 0, self.vocab_size) for i in asking]
        width = min(max(counts) + SLACK, raw.shape[1])  # beyond the count, so that equals come in order of their ids
        values, ids = candidates(_take(raw, asking), width)
        values -= _take(log_sum, asking)
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        return {
            i: tuple(zip(ids[:count], values[:count], strict=True))
            for i, count, (ids, values) in zip(asking, counts, pairs, strict=True)
        }

    def _column(self, numbers: list[float]) -> Tensor:
        """[R] numbers as a float64 column [R, 1]."""
        return torch.tensor(numbers, dtype=torch.float64, device=self.device)[:, None]


def _take(x: Tensor, index: list[int]) -> Tensor:
    """Rows of ``x`` in rising order of ``index``; ``x`` itself, uncopied, when that is all of them."""
    return x if len(index) == len(x) else x[index]


def _uniform(row: SamplingRow) -> float:
    if row.params.seed is None:
        raise ValueError("seed is None on a sampled row; whoever begins the stream must pick one")
    return uniform(row.params.seed, row.position)


def _token(row: int, token_id: int, logprob: float, confidence: float, top: tuple[tuple[int, float], ...]) -> Token:
    if not 0.0 < confidence <= 1.0:  # also false for NaN
        raise HeliosError(
            f"the logits of row {row} are not finite (largest probability {confidence}); "
            "the checkpoint is damaged or its numbers exceed the dtype: try bfloat16 or float32"
        )
    return Token(token_id, logprob, confidence, top)
