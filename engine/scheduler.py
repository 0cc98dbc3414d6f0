"""The scheduler: which sequences take part in the next sweep, and with how many rows.

Decoding sequences always take part, oldest first; prompts fill what is left of ``prefill_rows``, in order of
arrival. When the KV blocks of a home run out, the youngest running sequence there gives its blocks back and waits at
the head of the queue, to be prefilled again with what it has generated: later, but with the same tokens.
"""

from collections import deque
from collections.abc import Sequence as Seq

from .batch import TILE_ROWS, Share
from .kv import blocks_for
from .kv_homes import KVHome
from .sequence import Sequence, Status


class Scheduler:
    """Waiting and running sequences of one engine. ``layers`` is the range a sequence needs KV for."""

    def __init__(self, homes: Seq[KVHome], layers: range, max_sequences: int, prefill_rows: int) -> None:
        """A sequence goes to the first of ``homes`` that has room for it."""
        self.homes = homes
        self.layers = layers
        self.max_sequences = max_sequences
        self.prefill_rows = prefill_rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        self._free(sequence)
        sequence.status = Status.FINISHED

    def schedule(self) -> list[Share]:
        """The shares of the next sweep; empty when there is nothing to do."""
        shares: list[Share] = []
        budget = self.prefill_rows
        for sequence in list(self.running):
            if sequence.status is Status.RUNNING and self._extend(sequence):
                budget -= self._share(sequence, budget, shares)
        while budget > 0 and self._admit():
            budget -= self._share(self.running[-1], budget, shares)
        return shares

    def _share(self, sequence: Sequence, budget: int, shares: list[Share]) -> int:
        """Add the sequence's rows; returns how many of the prefill budget they take."""
        start = sequence.kv.of(self.layers)
        missing = len(sequence.tokens) - start
        if missing == 1:
            shares.append(Share(sequence, start, 1, 1))
            return 0
        count = min(missing, budget, TILE_ROWS)
        if count > 0:
            shares.append(Share(sequence, start, count, 1 if count == missing else 0))
        return count

    def _admit(self) -> bool:
        """Move the longest waiting sequence to the running ones if its blocks, and one for each other, are free."""
        if not self.waiting or len(self.running) >= self.max_sequences:
            return False
        sequence = self.waiting[0]
        for home in self.homes:
            others = sum(other.home is home for other in self.running)
            need, spare = (sequence.longest, 0) if home.reserves else (len(sequence.tokens), others)
            if blocks_for(need) + spare <= home.pool.free_blocks:
                break
        else:
            return False
        self.waiting.popleft()
        sequence.home = home
        sequence.blocks = home.pool.take(blocks_for(need))
        sequence.status = Status.RUNNING
        self.running.append(sequence)
        return True

    def _extend(self, sequence: Sequence) -> bool:
        """See that the sequence has a block for its next position; False if it had to give way itself."""
        home = sequence.home
        assert home is not None, "a running sequence has a home"
        missing = max(0, blocks_for(len(sequence.tokens)) - len(sequence.blocks))
        while missing > home.pool.free_blocks:
            youngest = next(other for other in reversed(self.running) if other.home is home)
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.blocks += home.pool.take(missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._free(sequence)
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)

    def _free(self, sequence: Sequence) -> None:
        if sequence.home is not None:
            sequence.home.pool.give_back(sequence.blocks)
        sequence.home, sequence.blocks = None, []
        sequence.kv.cut(0)
