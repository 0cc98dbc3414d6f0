"""What a request asks to be done to its logits before a token is chosen: bias, penalties, bans."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ..request import SamplingParams


def changes_logits(params: SamplingParams, banned_ids: Sequence[int]) -> bool:
    """Whether ``apply`` would do anything."""
    return bool(
        banned_ids
        or params.logit_bias
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def apply(
    logits: Tensor,
    params: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    banned_ids: Sequence[int],
) -> None:
    """Change one row's float32 ``logits`` [W] in place: bias, repetition, presence and frequency, then bans."""
    if params.logit_bias:
        ids = _ids(logits, list(params.logit_bias))
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    if params.repetition_penalty != 1.0:
        _repetition(logits, params.repetition_penalty, [*prompt_ids, *output_ids])
    if output_ids and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(output_ids)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        # OpenAI's formula: count x frequency + (count > 0) x presence, over what was generated and not the prompt.
        logits[_ids(logits, list(counts))] -= times * params.frequency_penalty + params.presence_penalty
    if banned_ids:
        logits[_ids(logits, banned_ids)] = float("-inf")


def _repetition(logits: Tensor, penalty: float, seen: Sequence[int]) -> None:
    """Divide positive and multiply negative logits of tokens seen (Keskar et al., CTRL, 2019), each once."""
    ids = _ids(logits, seen)
    # Repeated ids read the same old value and write the same new one, so they need not be made unique.
    score = logits[ids]
    logits[ids] = torch.where(score < 0, score * penalty, score / penalty)


def _ids(logits: Tensor, ids: Sequence[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)
