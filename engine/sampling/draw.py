"""Draw one token per row under temperature, top-k, top-p and min-p.

The filters follow transformers' processors in transformers' order: temperature; top-k, which keeps every token equal
to the k-th; top-p over what top-k left; min-p relative to the likeliest. All three keep a prefix of the tokens ranked
by logit (equals by id), so a bounded list of the best usually decides the draw. Where the list is too short to prove
the prefix complete, it is taken longer, up to the whole vocabulary: the draw never depends on its length.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..request import SamplingParams
from .wide import candidates, inverse_cdf

FIRST_WIDTH = 64
"""Candidates tried first without a top-k; enough for top-p 0.9 on most tokens of a trained model."""
SLACK = 16
"""Candidates beyond top-k, since the list must reach past the tokens equal to the k-th."""
GROWTH = 8


class Filters(NamedTuple):
    """One column per parameter, [R, 1]; float64 but for ``top_k``, an integer of which 0 is off."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    mass: Tensor
    """Sum over the vocabulary of exp((logit - largest) / temperature); read only where top-p is on and top-k off."""

    def rows(self, index: Tensor) -> "Filters":
        return Filters(*(column[index] for column in self))


def is_ranked(params: SamplingParams) -> bool:
    """Whether the draw needs tokens ranked, by top-k or top-p; min-p alone is a threshold."""
    return params.top_k > 0 or params.top_p < 1.0


def draw_unranked(weights: Tensor, min_p: Sequence[float], uniforms: Tensor) -> Tensor:
    """Draw in proportion to ``weights`` [R, W], which are set to 0 below ``min_p`` times the largest.

    ``uniforms`` [R] float64 -> token ids [R].
    """
    if any(min_p):
        share = torch.tensor(min_p, dtype=weights.dtype, device=weights.device)[:, None]
        weights.masked_fill_(weights < share * weights.amax(-1, keepdim=True), 0.0)
    return inverse_cdf(weights, uniforms)


def draw_ranked(logits: Tensor, filters: Filters, width: int) -> Tensor:
    """Draw under all filters from ``logits`` [R, W], trying ``width`` candidates first -> token ids [R]."""
    width = min(width, logits.shape[1])
    values, ids = candidates(logits, width)  # [R, width] both
    weights, complete = _kept(values, filters, whole=width == logits.shape[1])
    cdf = weights.cumsum(-1)
    rank = torch.searchsorted(cdf, filters.uniform * cdf[:, -1:], right=True)  # [R, 1]
    drawn = ids.gather(1, rank)[:, 0]
    open_rows = (~complete).nonzero()[:, 0]
    if len(open_rows):
        drawn[open_rows] = draw_ranked(logits[open_rows], filters.rows(open_rows), width * GROWTH)
    return drawn


def _kept(values: Tensor, filters: Filters, whole: bool) -> tuple[Tensor, Tensor]:
    """Weights of ranked candidates [R, C], 0 where filtered out, and whether the kept ones are surely all [R].

    ``whole`` says that the candidates are the whole vocabulary. Weights are relative to the likeliest's 1.
    """
    columns = values.shape[1]
    weights = ((values.double() - values[:, :1]) / filters.temperature).exp()
    limited = filters.top_k > 0
    kth = values.gather(1, filters.top_k.clamp(1, columns) - 1)  # of a list shorter than k the last: not complete
    weights = torch.where(limited & (values < kth), 0.0, weights)
    total = torch.where(limited, weights.sum(-1, keepdim=True), filters.mass)
    before = weights.cumsum(-1) - weights
    outside = (filters.top_p < 1.0) & (before >= filters.top_p * total)
    outside |= weights < filters.min_p
    weights = weights.masked_fill(outside, 0.0)
    # Only what is larger than the last candidate is surely listed with all its equals.
    last = values[:, -1:]
    least = torch.where(weights > 0, values, torch.inf).amin(-1, keepdim=True)
    complete = (least > last) & (~limited | (kth > last))
    return weights, complete[:, 0] | whole
