"""What transformers' logits processors do to one row, and rows to compare with."""

import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.request import SamplingParams
from engine.sampling import Sampler, SamplingRow


def oracle_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Filtered distribution [V] of float32 ``logits`` [V], by transformers in its own order."""
    ids, scores = torch.zeros(1, 0, dtype=torch.long), logits[None].clone()
    steps = []
    if params.temperature != 1.0:
        steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    for step in steps:
        scores = step(ids, scores)
    return scores.softmax(-1)[0]


def oracle_repetition(logits: Tensor, penalty: float, seen: list[int]) -> Tensor:
    return RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen]), logits[None].clone())[0]


def draws(logits: Tensor, params: SamplingParams, count: int) -> Tensor:
    """Token ids at positions 0 .. count - 1 of one row's ``logits`` [V], in batches of 500."""
    sampler = Sampler(len(logits), "cpu")
    ids: list[int] = []
    for start in range(0, count, 500):
        rows = [SamplingRow(params, position) for position in range(start, min(start + 500, count))]
        ids += [token.id for token in sampler.sample(logits.expand(len(rows), -1), rows)]
    return torch.tensor(ids)
