"""Which model serves a request for "auto": untried candidates first, then the best by the objective."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .pht import Figures

Objective = Literal["throughput", "latency"]
TRIALS = 5
"""Live requests each candidate serves before it is ranked (helios.md section 2, step 2)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that can take a request now."""

    model: str
    figures: Figures
    assigned: int
    """Requests given to it since the router started."""


@dataclass(frozen=True, slots=True)
class Choice:
    model: str
    reason: str
    """The figures that led to it, in words."""


def choose(candidates: Sequence[Candidate], objective: Objective) -> Choice:
    """The candidate for the next request. ``candidates`` are in configured order and not empty.

    Trials are counted when they are given out, not when they finish, so that a burst does not all go to one
    candidate that nothing is known of yet.
    """
    if len(candidates) == 1:
        return Choice(candidates[0].model, "the only model ready")
    for candidate in candidates:
        tried = max(candidate.assigned, candidate.figures.requests)
        if tried < TRIALS:
            return Choice(candidate.model, f"trial {tried + 1} of {TRIALS}: too little is known of it")
    known = [candidate for candidate in candidates if _cost(candidate, objective) is not None]
    if not known:
        fewest = min(candidates, key=lambda candidate: candidate.assigned)
        return Choice(fewest.model, f"no model has finished a request yet; fewest given out ({fewest.assigned})")
    best = min(known, key=lambda candidate: _cost(candidate, objective) or 0.0)
    compared = ", ".join(f"{candidate.model} {_figure(candidate, objective)}" for candidate in known)
    return Choice(best.model, f"best {objective}: {compared}")


def _cost(candidate: Candidate, objective: Objective) -> float | None:
    """Seconds to be made small: per generated token, or to the first token. None without a finished request."""
    figures = candidate.figures
    if not figures.requests:
        return None
    if objective == "latency":
        return figures.ttft_s
    return 1 / figures.throughput if figures.throughput else None


def _figure(candidate: Candidate, objective: Objective) -> str:
    cost = _cost(candidate, objective) or 0.0
    return f"{cost * 1e3:.0f} ms to first token" if objective == "latency" else f"{1 / cost:.1f} tokens/s"
