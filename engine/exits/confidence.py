"""How sure logits are of their best token."""

from torch import Tensor


def confidence(logits: Tensor, margin: bool = False) -> Tensor:
    """The largest probability [N] of logits [N, V] at temperature 1, less the second largest if ``margin``."""
    if len(logits) == 0:
        return logits.float().new_empty(0)
    values = logits.float()
    best = values.topk(2 if margin else 1, -1).values
    probabilities = (best - values.logsumexp(-1, keepdim=True)).exp()
    return probabilities[:, 0] - probabilities[:, 1] if margin else probabilities[:, 0]
