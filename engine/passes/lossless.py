"""Self-speculation: the cut model drafts, the deeper layers verify several tokens in one pass, and the output is the
whole model's, token for token.

Draws are keyed by (seed, position), so the whole model's token at a position is a function of its logits alone: a draft
is accepted if it is that token, greedy or sampled, and the first that is not is replaced by it. Drafts are drawn with
the same keys, which makes them agree as often as the two distributions allow. K and V of the shared layers and the
states that leave them are those of the drafts; nothing is computed twice but what follows a draft that was wrong.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from ..batch import Share
from ..errors import HeliosError
from ..request import SamplingParams, Token
from ..sampling import Sampler
from ..sequence import Sequence
from ..sweep import ExitHead
from .base import PassStats, Said, check_depth, refuse_threshold, sampling_row
from .plain import sample
from .trunk import Trunk


@dataclass(slots=True)
class _Draft:
    """What a step adds to one sequence for a while: its tokens and output end with the drafts."""

    sequence: Sequence
    most: int
    made: int
    """Tokens of its output before them."""
    open: bool = True

    @property
    def count(self) -> int:
        return len(self.sequence.output) - self.made

    @property
    def wanted(self) -> bool:
        """Whether there is to be another one."""
        return self.open and self.count < self.most

    def add(self, token: Token, least: float) -> None:
        self.sequence.tokens.append(token.id)
        self.sequence.output.append(token.id)
        self.open = token.confidence >= least and token.id not in self.sequence.stop_ids

    def drop(self) -> None:
        """Take the drafts off again."""
        del self.sequence.tokens[len(self.sequence.tokens) - self.count :]
        del self.sequence.output[self.made :]


class LosslessPass:
    """One step: up to ``draft_tokens`` drafts, and one token more, for every sequence whose text is through."""

    def __init__(
        self,
        trunk: Trunk,
        drafting: ExitHead,
        last: ExitHead,
        sampler: Sampler,
        *,
        draft_tokens: int,
        least: float,
    ) -> None:
        """``drafting`` is the exit's head; a draft less sure than ``least`` is a sequence's last of the step."""
        self._trunk, self._drafting, self._last, self._sampler = trunk, drafting, last, sampler
        self._draft_tokens, self._least = draft_tokens, least
        self.layers = trunk.segments[0]
        self.ahead, self.stats = draft_tokens, PassStats(rows=trunk.rows)

    def check(self, params: SamplingParams) -> None:
        check_depth(params, [self._trunk.segments[-1].stop])
        refuse_threshold(params)

    def run(self, number: int, shares: Seq[Share]) -> list[Said]:
        drafts = [self._begin(share.sequence) for share in shares if share.logit_rows]
        try:
            self._draft(number, shares, drafts)
            said = self._verify(number, drafts) if drafts else []
        except HeliosError:
            for share in shares:  # whoever has no token begins again at the first layer
                share.sequence.kv.cut(share.start)
            raise
        finally:
            for draft in drafts:
                draft.drop()
        for each in said:  # what follows a wrong draft has K and V of another text
            each.sequence.kv.cut(len(each.sequence.tokens) + max(0, len(each.tokens) - 1))
        return said

    def forget(self, sequence: Sequence) -> None:
        self._trunk.forget(sequence)

    def _begin(self, sequence: Sequence) -> _Draft:
        room = sequence.longest - len(sequence.tokens) - 1  # a sequence's last token need not be drafted
        return _Draft(sequence, max(0, min(self._draft_tokens, room)), len(sequence.output))

    def _draft(self, number: int, shares: Seq[Share], drafts: list[_Draft]) -> None:
        """Take the shares, and then one draft after the other, through the shallow layers."""
        by_sequence = {id(draft.sequence): draft for draft in drafts}
        while shares:
            ahead = [by_sequence.get(id(share.sequence)) for share in shares]
            asked = [draft for draft in ahead if draft and draft.wanted]
            rows = [replace(s, logit_rows=int(d in asked)) for s, d in zip(shares, ahead, strict=True)]
            logits = self._trunk.run(number, 0, rows, self._drafting if asked else None)
            shares = []
            if asked:
                found = sample(self._sampler, logits, [sampling_row(draft.sequence) for draft in asked])
                for draft, token in zip(asked, found, strict=True):
                    if isinstance(token, Token):
                        draft.add(token, self._least)
                        shares.append(Share(draft.sequence, len(draft.sequence.tokens) - 1, 1))

    def _verify(self, number: int, drafts: list[_Draft]) -> list[Said]:
        """Take what passed the shallow layers through the deep ones, and see how far the drafts are right."""
        layers = self._trunk.segments[1]
        shares = []
        for draft in drafts:
            start = draft.sequence.kv.of(layers)
            shares.append(Share(draft.sequence, start, len(draft.sequence.tokens) - start, draft.count + 1))
        logits = self._trunk.run(number, 1, shares, self._last)
        rows = [sampling_row(d.sequence, d.made + i) for d in drafts for i in range(d.count + 1)]
        found = iter(sample(self._sampler, logits, rows))
        return [self._accepted(draft, [next(found) for _ in range(draft.count + 1)], layers.stop) for draft in drafts]

    def _accepted(self, draft: _Draft, found: list[Token | HeliosError], depth: int) -> Said:
        """The whole model's tokens as far as each follows from right drafts."""
        drafts = draft.sequence.output[draft.made :]
        tokens: list[Token] = []
        for i, token in enumerate(found):
            if isinstance(token, HeliosError):
                return Said(draft.sequence, tuple(tokens), token)
            tokens.append(replace(token, depth=depth))
            if i == len(drafts) or token.id != drafts[i]:
                break
        self.stats.drafted += len(drafts)
        self.stats.accepted += len(tokens) - 1
        return Said(draft.sequence, tuple(tokens))
