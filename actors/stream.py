"""The ledger of a stream, kept by whoever began it, so that the stream survives the replica that runs it."""

import random
from dataclasses import dataclass, field, replace

from engine.errors import HeliosError
from engine.request import Delta, SamplingParams, Usage

from .prompts import Prompt


@dataclass(slots=True)
class Ledger:
    """All that is needed to go on with a stream anywhere: prompt, parameters with a seed, tokens delivered."""

    request_id: str
    prompt: Prompt
    """As it came, until a replica has told its token ids."""
    params: SamplingParams
    prompt_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    attempts: int = 0
    losses: int = 0
    """Times a replica died under the stream."""
    sum_confidence: float = 0.0
    breaches: tuple[int, int] = (0, 0)
    """Of the attempts before this one, and of this one."""

    @classmethod
    def begin(cls, request_id: str, prompt: Prompt, params: SamplingParams) -> "Ledger":
        """Draws a seed where none is given: a stream resumed with another seed would go on differently."""
        seed = random.getrandbits(62) if params.seed is None else params.seed
        return cls(request_id, prompt, replace(params, seed=seed))

    def next_attempt(self) -> str:
        """The id the sequence has on a replica. Each attempt has its own: a replica may still run the last one."""
        self.attempts += 1
        self.breaches = (sum(self.breaches), 0)
        return self.request_id if self.attempts == 1 else f"{self.request_id}~{self.attempts}"

    def opened(self, prompt_ids: tuple[int, ...]) -> None:
        """From now on the token ids stand for the prompt, whatever tokenizer another replica has."""
        self.prompt, self.prompt_tokens = prompt_ids, len(prompt_ids)

    def deliver(self, delta: Delta) -> Delta:
        """Note what is about to be delivered; returns it under the stream's own request id, with the usage of all
        attempts."""
        self.tokens.extend(token.id for token in delta.tokens)
        self.sum_confidence += sum(token.confidence for token in delta.tokens)
        self.breaches = (self.breaches[0], delta.usage.breaches)
        if delta.request_id == self.request_id:
            return delta
        usage = replace(
            delta.usage, confidence=self.sum_confidence / max(1, len(self.tokens)), breaches=sum(self.breaches)
        )
        return replace(delta, request_id=self.request_id, usage=usage)

    def end(self, error: HeliosError) -> Delta:
        """The last delta of a stream that could not go on."""
        usage = Usage(self.prompt_tokens, len(self.tokens))
        return Delta(self.request_id, (), "", usage, "error", error=error)
