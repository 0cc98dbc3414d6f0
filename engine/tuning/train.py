"""Training heads on kept states to say what the last layer says. An adapter starts as the least-squares map to the
final states, a block as the trunk's next one.

The loss of a position is the Kullback-Leibler divergence from the model's own distribution to the head's, or the
cross-entropy of its likeliest token, both over a part of the vocabulary: the tokens that the model finds likeliest at
the batch's positions, and some drawn at random.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..exits.confidence import confidence
from ..exits.profile import ExitProfile
from .head import Head

DRAWN = 1024
"""Further tokens of a batch's loss."""
BATCH = 512
"""Positions of a step."""
Loss = Literal["kl", "cross-entropy"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
Progress = Callable[[int, int, float], None]
"""Told of steps done, of all, and of the loss."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a head is trained."""

    epochs: int = 3
    learning_rate: float = 1e-3
    batch: int = BATCH
    patience: int = 2
    """Evaluations without a better agreement after which it stops."""
    evaluate_every: int = 400
    """Steps between evaluations on held-out positions."""
    seed: int = 0
    loss: Loss = "kl"


@dataclass(frozen=True, slots=True)
class Examples:
    """States [N, H] at an exit and the final ones [N, H] of the same positions, text after text."""

    states: Tensor
    final: Tensor
    likeliest: Tensor
    """Tokens [N, K] that the model itself finds likeliest there, the best first."""
    lengths: Sequence[int]
    """Of the texts."""

    def batches(self, rows: int, generator: torch.Generator | None = None) -> Iterator[tuple[Tensor, list[int]]]:
        """Whole texts of about so many positions together, in order or shuffled: which positions, and their lengths."""
        starts = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        order: Sequence[int] = range(len(self.lengths))
        if generator is not None:
            order = torch.randperm(len(self.lengths), generator=generator).tolist()
        chosen: list[int] = []
        for number in order:
            chosen.append(number)
            if sum(self.lengths[i] for i in chosen) >= rows:
                yield self._rows(chosen, starts)
                chosen = []
        if chosen:
            yield self._rows(chosen, starts)

    def _rows(self, chosen: list[int], starts: list[int]) -> tuple[Tensor, list[int]]:
        return torch.cat([torch.arange(starts[i], starts[i + 1]) for i in chosen]), [self.lengths[i] for i in chosen]


@dataclass(slots=True)
class Trained:
    """A head at its best on held-out positions."""

    head: Head
    agreement: float
    steps: int
    losses: list[float] = field(default_factory=list)


def train(
    head: Head,
    learned: Examples,
    held_out: Examples,
    lm_head: Tensor,
    settings: Settings,
    progress: Progress | None = None,
) -> Trained:
    """Train ``head``; its weights change."""
    generator = torch.Generator().manual_seed(settings.seed)
    parameters = [*head.weights.values()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=0.01)
    total = max(1, len(learned.states) // settings.batch) * settings.epochs
    best = Trained(head.copy(), agreement(head, held_out, lm_head), 0)
    since = 0
    for step, (rows, lengths) in zip(range(total), _batches(head, learned, settings, generator), strict=False):
        for group in optimiser.param_groups:
            group["lr"] = settings.learning_rate * _schedule(step / total)
        said = head(learned.states[rows], lengths)
        loss = loss_of(said, learned.final[rows], learned.likeliest[rows], lm_head, generator, settings.loss)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        best.losses.append(float(loss.detach()))
        if progress:
            progress(step + 1, total, best.losses[-1])
        if (step + 1) % settings.evaluate_every == 0 or step + 1 == total:
            found = agreement(head, held_out, lm_head)
            since = 0 if found > best.agreement else since + 1
            if found > best.agreement:
                best.head, best.agreement, best.steps = head.copy(), found, step + 1
            if since > settings.patience:
                break
    return best


def loss_of(
    said: Tensor, final: Tensor, likeliest: Tensor, lm_head: Tensor, generator: torch.Generator, loss: Loss = "kl"
) -> Tensor:
    """Mean loss of some positions: what a head made of their states [N, H], the final ones [N, H], and the tokens that
    the model finds likeliest there [N, K]."""
    drawn = torch.randint(len(lm_head), (DRAWN,), generator=generator)
    tokens = torch.unique(torch.cat([likeliest.flatten().long(), drawn]))
    matrix = lm_head[tokens]
    logits = (said.to(matrix.dtype) @ matrix.T).float()
    if loss == "cross-entropy":
        return F.cross_entropy(logits, torch.searchsorted(tokens, likeliest[:, 0].long().contiguous()))
    wanted = (final.to(matrix.dtype) @ matrix.T).float().log_softmax(-1)
    return F.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="batchmean")


def agreement(head: Head, examples: Examples, lm_head: Tensor) -> float:
    """Share of positions whose likeliest token is the last layer's."""
    return profiled(head, examples, lm_head)[0].agreement(head.layer)


@torch.no_grad()
def profiled(head: Head, examples: Examples, lm_head: Tensor, rows: int = 1024) -> tuple[ExitProfile, ExitProfile]:
    """What an exit says of positions: by its largest probability, and by the lead over the second largest; -log p is
    that of the last layer's likeliest token."""
    made = ExitProfile((head.layer,)), ExitProfile((head.layer,))
    for which, lengths in examples.batches(rows):
        wanted = examples.likeliest[which, 0].long()
        said = (head(examples.states[which], lengths).to(lm_head.dtype) @ lm_head.T).float()
        nll = F.cross_entropy(said, wanted, reduction="none").numpy()
        agrees = (said.argmax(-1) == wanted).numpy()
        for profile, margin in zip(made, (False, True), strict=True):
            profile.add(head.layer, confidence(said, margin).numpy(), agrees, nll)
    return made


def _batches(
    head: Head, examples: Examples, settings: Settings, generator: torch.Generator
) -> Iterator[tuple[Tensor, list[int]]]:
    """Without end: positions drawn from all texts, or whole texts for a block."""
    count, size = len(examples.states), settings.batch
    while True:
        if head.kind == "block":
            yield from examples.batches(size, generator)
            continue
        order = torch.randperm(count, generator=generator)
        for step in range(max(1, count // size)):
            rows = order[step * size : (step + 1) * size].sort().values
            yield rows, [len(rows)]


def _schedule(done: float) -> float:
    """A twentieth of the way up, then down along a cosine."""
    return done / 0.05 if done < 0.05 else 0.5 * (1 + math.cos(math.pi * (done - 0.05) / 0.95))
