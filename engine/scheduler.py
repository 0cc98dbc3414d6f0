"""The scheduler: which sequences take part in the next sweep, and with how many rows.

Decoding sequences take part in every sweep, oldest first; prompts fill what is left of ``prefill_rows``, in order of
arrival. Who is let in, and when, is the admission's choice: it makes FlexGen's zig-zag and diagonal block schedules of
the same sweeps. When the KV blocks of a home run out, the youngest running sequence there gives its blocks back and
waits at the head of the queue, to be prefilled again with what it has generated: later, but with the same tokens.
"""

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from .batch import Share
from .config import TILE_ROWS, Schedule
from .kv import blocks_for
from .kv_homes import KVHome
from .sequence import Sequence, Status


class Admission:
    """Continuous batching: whoever there is room for."""

    eager = False
    """Let sequences in before there are rows for their prompts."""

    def begin(self, running: Seq[Sequence]) -> None:
        """A sweep is about to be scheduled."""

    def admits(self, sequence: Sequence, running: Seq[Sequence]) -> bool:
        """Whether the next waiting sequence may join, if there is room for it."""
        return True

    def holds(self, running: Seq[Sequence]) -> bool:
        """Whether sequences that could decode wait for the others' prompts."""
        return False


class ZigZag(Admission):
    """FlexGen's zig-zag block: sequences are let in together and decode together; then comes the next block."""

    eager = True

    def __init__(self, block: int) -> None:
        self._block = block
        self._admitted = 0

    def begin(self, running: Seq[Sequence]) -> None:
        if not running:
            self._admitted = 0

    def admits(self, sequence: Sequence, running: Seq[Sequence]) -> bool:
        if self._admitted >= self._block or any(other.output for other in running):
            return False
        self._admitted += 1
        return True

    def holds(self, running: Seq[Sequence]) -> bool:
        return any(not other.output for other in running)


class Diagonal(Admission):
    """FlexGen's diagonal block: in a block of B sequences with n tokens each to generate, B / n join in every sweep.

    They then stand at evenly spread positions, so their KV takes B * (s + n / 2) positions at any time instead of
    B * (s + n) at the end of a block; and whoever ends makes room for the next.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._credit = 0.0
        self._step = 1.0

    def begin(self, running: Seq[Sequence]) -> None:
        self._credit = min(self._credit, 1.0) + self._step  # what is left of one is kept, or B / n would be rounded

    def admits(self, sequence: Sequence, running: Seq[Sequence]) -> bool:
        self._step = self._block / max(1, sequence.longest - sequence.n_prompt)
        if self._credit < 1 and running:
            return False
        self._credit = max(0.0, self._credit - 1)
        return True


def admission(schedule: Schedule, block: int) -> Admission:
    """What a schedule's name stands for, for blocks of so many sequences."""
    if schedule == "zigzag":
        return ZigZag(block)
    return Diagonal(block) if schedule == "diagonal" else Admission()


class Scheduler:
    """Waiting and running sequences of one engine. ``layers`` is the range a sequence needs KV for."""

    def __init__(
        self,
        homes: Seq[KVHome],
        layers: range,
        max_sequences: int,
        prefill_rows: int,
        schedule: Schedule = "continuous",
        tile_rows: int = TILE_ROWS,
        freed: Callable[[Sequence], None] = lambda _: None,
        ahead: int = 0,
    ) -> None:
        """A sequence goes to the first of ``homes`` that has room for it, and adds ``tile_rows`` to a sweep at most;
        ``freed`` is told of each that gave its blocks back; ``ahead`` are positions that a step may add for a while."""
        self.tile_rows = tile_rows
        self._freed, self._ahead = freed, ahead
        self.admission = admission(schedule, max_sequences)
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

    def make_room(self, home: KVHome, blocks: int) -> None:
        """Let the youngest sequences of a home wait until the others have at most so many of its blocks."""
        while home.pool.n_blocks - home.pool.free_blocks > blocks:
            self._preempt(next(other for other in reversed(self.running) if other.home is home))

    def renumber(self, home: KVHome, moved: Mapping[int, int]) -> None:
        """Blocks of a home have new ids."""
        for sequence in self.running:
            if sequence.home is home:
                sequence.blocks = [moved.get(block, block) for block in sequence.blocks]

    def schedule(self) -> list[Share]:
        """The shares of the next sweep; empty when there is nothing to do."""
        shares: list[Share] = []
        budget = self.prefill_rows
        self.admission.begin(self.running)
        holds = self.admission.holds(self.running)
        for sequence in list(self.running):
            if holds and sequence.output and sequence.kv.of(self.layers) == len(sequence.tokens) - 1:
                continue
            if sequence.status is Status.RUNNING and self._extend(sequence):
                budget -= self._share(sequence, budget, shares)
        while (budget > 0 or self.admission.eager) and self._admit():
            budget -= self._share(self.running[-1], budget, shares)
        return shares

    def _share(self, sequence: Sequence, budget: int, shares: list[Share]) -> int:
        """Add the sequence's rows; returns how many of the prefill budget they take."""
        start = sequence.kv.of(self.layers)
        missing = len(sequence.tokens) - start
        if missing == 1:
            shares.append(Share(sequence, start, 1, 1))
            return 0
        count = min(missing, budget, self.tile_rows)
        if count > 0:
            shares.append(Share(sequence, start, count, 1 if count == missing else 0))
        return count

    def _admit(self) -> bool:
        """Move the longest waiting sequence to the running ones if its blocks are free.

        So must be one for each other that may still need one, or it would soon be thrown out again.
        """
        if not self.waiting or len(self.running) >= self.max_sequences:
            return False
        sequence = self.waiting[0]
        for home in self.homes:
            others = sum(other.home is home and _may_grow(other) for other in self.running)
            need, spare = (sequence.longest, 0) if home.reserves else (self._reach(sequence), others)
            if blocks_for(need) + spare <= home.pool.free_blocks:
                break
        else:
            return False
        if not self.admission.admits(sequence, self.running):
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
        missing = max(0, blocks_for(self._reach(sequence)) - len(sequence.blocks))
        while missing > home.pool.free_blocks:
            youngest = next(other for other in reversed(self.running) if other.home is home)
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.blocks += home.pool.take(missing)
        return True

    def _reach(self, sequence: Sequence) -> int:
        """Positions that the next step may need."""
        return max(len(sequence.tokens), min(len(sequence.tokens) + self._ahead, sequence.longest))

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
        self._freed(sequence)


def _may_grow(sequence: Sequence) -> bool:
    """Whether a running sequence does not yet have the blocks of its longest possible life."""
    return len(sequence.blocks) < blocks_for(sequence.longest)
