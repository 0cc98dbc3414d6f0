"""The scheduler: which sequences take part in the next sweep, and with how many rows.

Decoding sequences always take part, oldest first; prompts fill what is left of ``prefill_rows``, in order of
arrival. When the KV blocks run out, the youngest running sequence gives its blocks back and waits at the head of
the queue, to be prefilled again with what it has generated: later, but with the same tokens.
"""

from collections import deque

from .batch import Share
from .kv import BlockPool, blocks_for
from .sequence import Sequence, Status


class Scheduler:
    """Waiting and running sequences of one engine. ``layers`` is the range a sequence needs KV for."""

    def __init__(self, pool: BlockPool, layers: range, max_sequences: int, prefill_rows: int) -> None:
        self.pool = pool
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
        count = min(missing, budget)
        if count > 0:
            shares.append(Share(sequence, start, count, 1 if count == missing else 0))
        return count

    def _admit(self) -> bool:
        """Move the longest waiting sequence to the running ones if its blocks, and one for each other, are free."""
        if not self.waiting or len(self.running) >= self.max_sequences:
            return False
        sequence = self.waiting[0]
        need = blocks_for(len(sequence.tokens))
        if need + len(self.running) > self.pool.free_blocks:
            return False
        self.waiting.popleft()
        sequence.blocks = self.pool.take(need)
        sequence.status = Status.RUNNING
        self.running.append(sequence)
        return True

    def _extend(self, sequence: Sequence) -> bool:
        """See that the sequence has a block for its next position; False if it had to give way itself."""
        missing = blocks_for(len(sequence.tokens)) - len(sequence.blocks)
        while missing > self.pool.free_blocks:
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.blocks += self.pool.take(missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._free(sequence)
        sequence.status = Status.WAITING
        self.waiting.appendleft(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []
        sequence.kv.cut(0)
