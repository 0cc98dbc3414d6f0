"""What a pass is given and what it gives back."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from ..batch import Share
from ..errors import HeliosError, InvalidRequestError
from ..request import SamplingParams, Token
from ..sampling import SamplingRow
from ..sequence import Sequence


@dataclass(frozen=True, slots=True)
class Said:
    """What a pass made of one sequence: its next tokens, or why there are none."""

    sequence: Sequence
    tokens: tuple[Token, ...] = ()
    error: HeliosError | None = None


@dataclass(slots=True)
class PassStats:
    """Cumulative counters of a pass."""

    drafted: int = 0
    accepted: int = 0
    """Drafts that the whole model would have said."""
    rows: list[int] = field(default_factory=list)
    """Rows computed, by segment between exits; none in a plain pass."""


class Pass(Protocol):
    """Takes sequences through the model once, in one sweep or several, and chooses their next tokens."""

    layers: range
    """Those that every token passes: a sequence's KV in them tells which of its rows are due."""

    ahead: int
    """Positions beyond a sequence's tokens that a run may use for a while."""
    stats: PassStats

    def check(self, params: SamplingParams) -> None:
        """Raises InvalidRequestError for a depth or a threshold that the pass cannot give a request."""
        ...

    def run(self, number: int, shares: Seq[Share]) -> list[Said]:
        """What was said, of the sequences whose shares want logits. ``number`` counts the engine's steps.

        Raises CohortError if the KV of some sequences cannot be had, any other HeliosError if the pass cannot be done;
        no token is chosen then, and what KV the sequences have is right.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended, or gave its KV blocks back: what the pass keeps of it is not needed any more."""
        ...


def sampling_row(sequence: Sequence, made: int | None = None) -> SamplingRow:
    """What the choice of a sequence's next token depends on; or of the one after its first ``made``."""
    output = sequence.output if made is None else sequence.output[:made]
    return SamplingRow(
        params=sequence.params,
        position=sequence.n_prompt + len(output),
        prompt_ids=sequence.request.prompt_ids,
        output_ids=output,
        banned_ids=tuple(sequence.stop_ids) if len(output) < sequence.params.min_tokens else (),
    )


def check_depth(params: SamplingParams, depths: Seq[int]) -> None:
    """Raises InvalidRequestError for a depth that is not one of these."""
    if params.depth is not None and params.depth not in depths:
        served = f"served with tokens passing {', '.join(map(str, depths))} layers" if depths else "parked for now"
        remedy = "ask for one of them" if len(depths) > 1 else "leave it out, or have the model served with early_exit"
        raise InvalidRequestError(f"depth is {params.depth}; this model is {served}: {remedy}", "depth")


def refuse_threshold(params: SamplingParams) -> None:
    """Raises InvalidRequestError if a threshold is asked for."""
    if params.exit_threshold is not None:
        raise InvalidRequestError(
            f"exit_threshold is {params.exit_threshold:g}; this model is served whole, and no token leaves before: "
            "leave it out, or have the model served with early_exit",
            "exit_threshold",
        )
