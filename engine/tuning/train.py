"""Training heads on kept states: an adapter starts as the least-squares map to the final states, then learns to say
what the last layer says.

The loss of a position is the Kullback-Leibler divergence from the model's own distribution to the head's, both over a
part of the vocabulary: the tokens that the model finds likeliest at the batch's positions, and some drawn at random.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ..exits.profile import ExitProfile
from ..spec import ModelSpec

LIKELIEST = 12
"""Tokens of each position that the loss always has."""
DRAWN = 1024
"""Further tokens of a batch's loss."""
BATCH = 512
"""Positions of a step."""
FIT_ROWS = 4096
"""Positions that the least-squares map takes in at a time."""
RIDGE = 1e-3
"""Of the mean diagonal, what is added to it."""
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


@dataclass(slots=True)
class Head:
    """An adapter head in training, in float32."""

    norm: Tensor  # [H]
    linear: Tensor  # [H, H]
    up: Tensor  # [2 * adapter, H]
    down: Tensor  # [H, adapter]
    eps: float

    @classmethod
    def start(cls, spec: ModelSpec, norm: Tensor, width: int, seed: int) -> "Head":
        """With the model's own final norm, and an adapter that does nothing yet."""
        generator = torch.Generator().manual_seed(seed)
        hidden = spec.hidden_size
        up = torch.randn(2 * width, hidden, generator=generator) / math.sqrt(hidden)
        return cls(norm.float().clone(), torch.eye(hidden), up, torch.zeros(hidden, width), spec.norm_eps)

    def parameters(self) -> list[Tensor]:
        return [self.norm, self.linear, self.up, self.down]

    def normalised(self, states: Tensor) -> Tensor:
        return F.rms_norm(states.float(), (self.norm.numel(),), self.norm, self.eps)

    def __call__(self, states: Tensor) -> Tensor:
        """States [N, H] at the exit as the LM head wants them."""
        z = self.normalised(states)
        gate, up = F.linear(z, self.up).chunk(2, -1)
        return F.linear(z, self.linear) + F.linear(F.silu(gate) * up, self.down)

    def fit(self, states: Tensor, final: Tensor) -> None:
        """Set ``linear`` to the map from normalised states to final ones that has the least squared error."""
        hidden = self.norm.numel()
        gram, cross = torch.zeros(hidden, hidden), torch.zeros(hidden, hidden)
        for start in range(0, len(states), FIT_ROWS):
            z = self.normalised(states[start : start + FIT_ROWS])
            gram += z.T @ z
            cross += z.T @ final[start : start + FIT_ROWS].float()
        gram += RIDGE * gram.diagonal().mean() * torch.eye(hidden)
        self.linear = torch.linalg.solve(gram, cross).T.contiguous()

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """As a file of heads names them, in bfloat16."""
        named = {"norm": self.norm, "linear": self.linear, "up": self.up, "down": self.down}
        return {f"exits.{layer}.{name}.weight": tensor.detach().bfloat16() for name, tensor in named.items()}


@dataclass(slots=True)
class Trained:
    """A head at its best on held-out positions."""

    head: Head
    agreement: float
    steps: int
    losses: list[float] = field(default_factory=list)


def train(
    head: Head,
    states: Tensor,
    final: Tensor,
    lm_head: Tensor,
    held_out: tuple[Tensor, Tensor],
    settings: Settings,
    progress: Progress | None = None,
) -> Trained:
    """Train ``head`` on states [N, H] of an exit and the final ones [N, H] of the same positions."""
    generator = torch.Generator().manual_seed(settings.seed)
    for parameter in head.parameters():
        parameter.requires_grad_(True)
    optimiser = torch.optim.AdamW(head.parameters(), lr=settings.learning_rate, weight_decay=0.01)
    per_epoch = max(1, len(states) // settings.batch)
    total = per_epoch * settings.epochs
    best = Trained(_copy(head), agreement(head, *held_out, lm_head), 0)
    since = 0
    for step, rows in enumerate(_batches(len(states), settings, generator)):
        for group in optimiser.param_groups:
            group["lr"] = settings.learning_rate * _schedule(step / total)
        loss = distillation(head, states[rows], final[rows], lm_head, generator)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimiser.step()
        best.losses.append(float(loss.detach()))
        if progress:
            progress(step + 1, total, best.losses[-1])
        if (step + 1) % settings.evaluate_every == 0 or step + 1 == total:
            found = agreement(head, *held_out, lm_head)
            since = 0 if found > best.agreement else since + 1
            if found > best.agreement:
                best.head, best.agreement, best.steps = _copy(head), found, step + 1
            if since > settings.patience:
                break
    return best


def distillation(head: Head, states: Tensor, final: Tensor, lm_head: Tensor, generator: torch.Generator) -> Tensor:
    """Mean divergence of some positions."""
    with torch.no_grad():
        wanted = final.to(lm_head.dtype) @ lm_head.T
        likeliest = wanted.topk(LIKELIEST, -1).indices.flatten()
        drawn = torch.randint(len(lm_head), (DRAWN,), generator=generator)
        tokens = torch.unique(torch.cat([likeliest, drawn]))
        target = wanted[:, tokens].float().log_softmax(-1)
        matrix = lm_head[tokens]
    said = (head(states).to(matrix.dtype) @ matrix.T).float().log_softmax(-1)
    return F.kl_div(said, target, log_target=True, reduction="batchmean")


@torch.no_grad()
def agreement(head: Head, states: Tensor, final: Tensor, lm_head: Tensor) -> float:
    """Share of positions whose likeliest token is the last layer's."""
    profile = ExitProfile((0,))
    profiled(profile, 0, head, states, final, lm_head)
    return profile.agreement(0)


@torch.no_grad()
def profiled(
    profile: ExitProfile, layer: int, head: Head, states: Tensor, final: Tensor, lm_head: Tensor, rows: int = 1024
) -> None:
    """Add what an exit says of positions to a profile; -log p is that of the last layer's likeliest token."""
    for start in range(0, len(states), rows):
        wanted = (final[start : start + rows].to(lm_head.dtype) @ lm_head.T).argmax(-1)
        said = (head(states[start : start + rows]).to(lm_head.dtype) @ lm_head.T).float().log_softmax(-1)
        best = said.max(-1)
        nll = -said.gather(1, wanted[:, None])[:, 0]
        profile.add(layer, best.values.exp().numpy(), (best.indices == wanted).numpy(), nll.numpy())


def _copy(head: Head) -> Head:
    norm, linear, up, down = (parameter.detach().clone() for parameter in head.parameters())
    return Head(norm, linear, up, down, head.eps)


def _batches(count: int, settings: Settings, generator: torch.Generator) -> Iterator[Tensor]:
    per_epoch = max(1, count // settings.batch)
    for _ in range(settings.epochs):
        order = torch.randperm(count, generator=generator)
        for step in range(per_epoch):
            yield order[step * settings.batch : (step + 1) * settings.batch].sort().values


def _schedule(done: float) -> float:
    """A tenth of the way up, then down along a cosine."""
    return done / 0.05 if done < 0.05 else 0.5 * (1 + math.cos(math.pi * (done - 0.05) / 0.95))
