"""The engine: requests in, one sweep at a time, deltas out. Single-threaded; ``loop.EngineLoop`` gives it a thread."""

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from .boundary import BoundaryStates
from .build import Parts, build
from .config import EngineConfig
from .errors import CohortError, EngineDeadError, HeliosError, InvalidRequestError
from .intake import Intake
from .passes.choose import choose
from .request import Deliver, Delta, FinishReason, Request, Token
from .sampling import validate
from .scheduler import Scheduler
from .sequence import Sequence, Status
from .transition import Transition, park


@dataclass(slots=True)
class EngineStats:
    """Cumulative counters since the engine was loaded, and what it holds now."""

    sweeps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of requests that were started."""
    generated_tokens: int = 0
    finished_requests: int = 0
    cancelled_requests: int = 0
    failed_requests: int = 0
    sum_logprob: float = 0.0
    """Of the generated tokens; perplexity is exp(-sum_logprob / generated_tokens)."""
    sum_confidence: float = 0.0
    breaches: int = 0
    """Tokens that left at an exit with less confidence than its threshold."""
    busy_s: float = 0.0
    """Time spent in sweeps."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Drafts that were the whole model's tokens."""
    segment_rows: tuple[int, ...] = ()
    """Rows computed between one exit and the next, where tokens may stop at exits."""
    preemptions: int = 0
    """Times a running sequence gave its KV blocks back and had to be prefilled again."""
    depth: int = 0
    """Layers that tokens pass at most; 0 while the model is parked."""
    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes held on the device by use, and "capacity"."""


class Engine:
    """One model, its KV cache and its queue."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.config = parts.config
        self.spec = parts.spec
        """Of the whole model, or of what an engine was loaded with that is cut."""
        assert parts.tokenizer is not None, "only a simulation has none"
        self.tokenizer = parts.tokenizer
        self.device = parts.device
        self.tiers = parts.tiers
        self.context = parts.context
        self._pass = choose(parts)
        self.exit_profile = parts.exit_profile
        """What exits would have said of the tokens made so far; None if they are not scored."""
        self._intake = Intake(self.spec, self.tokenizer, self.context, parts.whole)
        self._close = weakref.finalize(self, parts.close)  # runs once, by itself if nobody closes the engine
        self._homes = parts.homes
        self._scheduler = Scheduler(
            self._homes,
            self._pass.layers,
            self.config.max_sequences,
            self.config.prefill_rows,
            self.config.schedule,
            self.config.tile_rows,
            lambda sequence: self._pass.forget(sequence),
            self._pass.ahead,
        )
        self._sequences: dict[str, Sequence] = {}
        self._counters = EngineStats()
        self._outgoing: list[tuple[Deliver, Delta]] = []
        self._stats = self._snapshot()

    @classmethod
    def load(cls, config: EngineConfig, progress: Callable[[int], None] | None = None) -> "Engine":
        """Read the model and reserve its memory. Raises as ``build.build``; ``progress`` is told of bytes read."""
        return cls(build(config, progress))

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def depth(self) -> int:
        """Layers of the model's own that tokens pass; 0 while it is parked."""
        return self._parts.depth

    @property
    def runs(self) -> bool:
        """Whether there is work that can be done: none can while the model is parked."""
        return self.has_work and self.depth > 0

    @property
    def kept(self) -> Mapping[int, BoundaryStates]:
        """Stores for the states that leave so many layers."""
        return self._parts.kept

    def serves(self, depth: int | None) -> bool:
        """Whether that is the depth at present; None is the whole model."""
        return self.depth == (self._parts.whole if depth is None else depth)

    def begin_change(self, depth: int | None) -> Transition:
        """Make room for another depth, None for the whole model. It goes on serving as before, until ``commit``.

        Raises ConfigError and OutOfMemoryError as Transition; nothing has changed then.
        """
        transition = Transition(self._parts, depth)
        transition.make_room(self._scheduler)
        return transition

    def commit(self, transition: Transition) -> None:
        """Between two sweeps: the depth that was loaded serves."""
        self._serve(transition.commit(self._parts, self._scheduler))

    def roll_back(self, transition: Transition) -> None:
        """Serve on as before it began."""
        transition.roll_back(self._scheduler)
        self._stats = self._snapshot()

    def change_depth(self, depth: int | None) -> None:
        """Serve with another depth from the next sweep on; wakes up a model that is parked.

        Raises as ``begin_change``, and CheckpointError if what is lacking cannot be read; it serves as before then.
        """
        if self.serves(depth):
            return
        transition = self.begin_change(depth)
        try:
            transition.load()
        except BaseException:
            self.roll_back(transition)
            raise
        self.commit(transition)

    def park(self) -> None:
        """Give memory back and keep the rest warm. Requests wait until ``change_depth``."""
        self._serve(park(self._parts, self._scheduler))

    def _serve(self, parts: Parts) -> None:
        self._parts = parts
        self._pass = choose(parts)
        self._scheduler.layers = self._pass.layers
        self._stats = self._snapshot()

    def has(self, request_id: str) -> bool:
        """Whether a request of that id waits or runs."""
        return request_id in self._sequences

    @property
    def waiting(self) -> int:
        """Requests that have no place in a sweep yet."""
        return len(self._scheduler.waiting)

    def prepare(self, request: Request, deliver: Deliver) -> Sequence:
        """Check a request and make its sequence, without admitting it. Changes nothing, so any thread may call it.

        Raises InvalidRequestError that names the field, the value and the limit.
        """
        params = validate(request.params, self.spec.vocab_size)
        self._pass.check(params)
        return self._intake.sequence(replace(request, params=params), deliver)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence of ``prepare``.

        Raises InvalidRequestError if its request id is in use, EngineDeadError if the engine is closed.
        """
        if not self._close.alive:
            raise EngineDeadError("the engine is closed and takes no more requests; load the model again")
        request_id = sequence.request.request_id
        if request_id in self._sequences:
            raise InvalidRequestError(f"request id '{request_id}' is in use; choose another", "request_id")
        self._sequences[request_id] = sequence
        self._scheduler.add(sequence)
        self._counters.prompt_tokens += sequence.n_prompt
        self._stats = self._snapshot()

    def cancel(self, request_id: str) -> None:
        """End a request now and free its blocks. One that is not here may just have ended: nothing happens."""
        sequence = self._sequences.get(request_id)
        if sequence:
            self._counters.cancelled_requests += 1
            self._finish(sequence, (), sequence.stop.flush(), "cancelled")
            self._deliver()

    def fail_all(self, error: HeliosError) -> None:
        """End every request with an error as its reason."""
        self._fail(list(self._sequences.values()), error)

    def _fail(self, sequences: list[Sequence], error: HeliosError) -> None:
        for sequence in sequences:
            self._counters.failed_requests += 1
            self._finish(sequence, (), "", "error", error=error)
        self._deliver()

    def step(self) -> bool:
        """Do one sweep and deliver what it produced; False if there was nothing to do.

        A sweep that cannot be done, since weights or KV cannot be read, ends the requests it was for with the reason;
        the engine stays fit for others.
        """
        shares = self._scheduler.schedule() if self.depth else []
        if not shares:
            return False
        started = time.perf_counter()
        try:
            said = self._pass.run(self._counters.sweeps, shares)
        except CohortError as error:  # the others' KV is as it was, so they go on in the next sweep
            harmed = {id(blocks) for blocks in error.blocks}
            self._fail([each for each in self._scheduler.running if id(each.blocks) in harmed], error.reason)
            return True
        except HeliosError as error:
            self._fail([share.sequence for share in shares], error)
            return True
        for each in said:
            for token in each.tokens:
                if each.sequence.status is not Status.FINISHED:
                    self._accept(each.sequence, token)
            if each.error and each.sequence.status is not Status.FINISHED:
                self._fail([each.sequence], each.error)
        self._settle()
        self._counters.sweeps += 1
        self._counters.busy_s += time.perf_counter() - started
        self._deliver()
        return True

    def _settle(self) -> None:
        """States that every sequence has gone on from are not needed any more."""
        behind = self._parts.behind
        if behind is not None and not any(behind.lags(sequence) for sequence in self._scheduler.running):
            behind.states.release(self.tiers["device"])
            self._serve(replace(self._parts, behind=None))

    def close(self) -> None:
        """End what runs, stop the threads that read ahead and close files. The engine cannot be used any more."""
        self.fail_all(EngineDeadError("the engine was closed before the request was done"))
        self._close()

    def stats(self) -> EngineStats:
        """Counters and gauges that hold all that was delivered so far. A snapshot, so any thread may ask for it."""
        return self._stats

    def _deliver(self) -> None:
        """Hand out what the last sweep or order produced. Who has a delta finds it counted in ``stats``."""
        self._stats = self._snapshot()
        outgoing, self._outgoing = self._outgoing, []
        for deliver, delta in outgoing:
            deliver(delta)

    def _snapshot(self) -> EngineStats:
        return replace(
            self._counters,
            drafted_tokens=self._pass.stats.drafted,
            accepted_tokens=self._pass.stats.accepted,
            segment_rows=tuple(self._pass.stats.rows),
            preemptions=self._scheduler.preemptions,
            depth=self.depth,
            running=len(self._scheduler.running),
            waiting=self.waiting,
            kv_blocks_used=sum(home.pool.n_blocks - home.pool.free_blocks for home in self._homes),
            kv_blocks_total=sum(home.pool.n_blocks for home in self._homes),
            memory={**self.tiers["device"].by_use(), "capacity": self.tiers["device"].capacity_bytes},
        )

    def _accept(self, sequence: Sequence, token: Token) -> None:
        """Append a token, release the text it makes final, and end the sequence if it is due."""
        sequence.append(token)
        counters, params, n = self._counters, sequence.params, len(sequence.output)
        counters.generated_tokens += 1
        counters.sum_logprob += token.logprob
        counters.sum_confidence += token.confidence
        counters.breaches += token.breached
        if token.id in sequence.stop_ids and n >= params.min_tokens:
            text = sequence.stop.push(sequence.text.finish()) + sequence.stop.flush()
            reason = None if token.id in self.spec.eos_ids else token.id
            return self._finish(sequence, (token,), text, "stop", reason)
        text = sequence.text.push((token.id,))
        if n >= params.min_tokens:
            text = sequence.stop.push(text)
        if sequence.stop.matched is not None:
            return self._finish(sequence, (token,), text, "stop", sequence.stop.matched)
        if n == params.max_tokens:
            text += sequence.stop.push(sequence.text.finish()) + sequence.stop.flush()
            return self._finish(sequence, (token,), text, "length")
        return self._post(sequence, Delta(sequence.request.request_id, (token,), text, sequence.usage))

    def _finish(
        self,
        sequence: Sequence,
        tokens: tuple[Token, ...],
        text: str,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        error: HeliosError | None = None,
    ) -> None:
        if sequence.status is not Status.FINISHED:
            self._scheduler.remove(sequence)
        del self._sequences[sequence.request.request_id]
        self._counters.finished_requests += reason in ("stop", "length")
        usage = sequence.usage
        self._post(sequence, Delta(sequence.request.request_id, tokens, text, usage, reason, stop_reason, error))

    def _post(self, sequence: Sequence, delta: Delta) -> None:
        self._outgoing.append((sequence.deliver, delta))
