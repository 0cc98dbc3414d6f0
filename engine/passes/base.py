"""What a pass is given and what it gives back."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from ..batch import Share
from ..errors import HeliosError
from ..request import Token
from ..sampling import SamplingRow
from ..sequence import Sequence


@dataclass(frozen=True, slots=True)
class Said:
    """What a pass made of one sequence: its next tokens, or why there are none."""

    sequence: Sequence
    tokens: tuple[Token, ...] = ()
    error: HeliosError | None = None


class Pass(Protocol):
    """Takes sequences through the model once, in one sweep or several, and chooses their next tokens."""

    layers: range
    """Those that every token passes: a sequence's KV in them tells which of its rows are due."""

    def run(self, number: int, shares: Seq[Share]) -> list[Said]:
        """What was said, of the sequences whose shares want logits. ``number`` counts the engine's steps.

        Raises CohortError if the KV of some sequences cannot be had, any other HeliosError if the pass cannot be done;
        no token is chosen then, and what KV the sequences have is right.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended, or gave its KV blocks back: what the pass keeps of it is not needed any more."""
        ...


def sampling_row(sequence: Sequence) -> SamplingRow:
    """What the choice of a sequence's next token depends on."""
    below_minimum = len(sequence.output) < sequence.params.min_tokens
    return SamplingRow(
        params=sequence.params,
        position=len(sequence.tokens),
        prompt_ids=sequence.request.prompt_ids,
        output_ids=sequence.output,
        banned_ids=tuple(sequence.stop_ids) if below_minimum else (),
    )
