"""A plan carried out for real on this machine, with random prompts: what it does, beside what was expected of it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..build import build
from ..config import EngineConfig
from ..engine import Engine
from ..request import Delta, Request, SamplingParams
from .job import Job
from .recording import Recorder
from .simulator.clock import Busy

SEED = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """Seconds, and tokens a second, as in ``plan.Prediction``."""

    prefill_s: float
    """Of sweeps with prompts in them."""
    decode_s: float
    throughput: float
    decode_throughput: float
    latency_s: float
    """Until the last token."""
    timeline: tuple[Busy, ...] = ()
    shown_s: tuple[float, float] = (0.0, 0.0)
    """When the last of the sweeps in which the most sequences decoded, and none was prefilled, began and ended."""

    def figures(self) -> dict[str, float]:
        """All but the timeline."""
        names = ("prefill_s", "decode_s", "throughput", "decode_throughput", "latency_s")
        return {name: round(getattr(self, name), 6) for name in names}


class _Tokens:
    """Counts what a sweep delivers."""

    def __init__(self) -> None:
        self.made = self.first = self.ended = 0
        self._begun: set[str] = set()

    def take(self, delta: Delta) -> None:
        if delta.error:
            raise delta.error
        self.made += len(delta.tokens)
        self.ended += delta.finish_reason is not None
        if delta.request_id not in self._begun:
            self._begun.add(delta.request_id)
            self.first += 1


def carry_out(config: EngineConfig, job: Job, progress: Callable[[int, int], None] | None = None) -> Trial:
    """Load the model and do the job, after one short request for what is made at first use. ``progress`` is told of
    the tokens made and of all.

    Raises as ``build.build``, and what ends a request.
    """
    recorder = Recorder()
    engine = Engine(build(config, storage=recorder))
    try:
        _serve(engine, Job(job.prompt_len, min(2, job.gen_len), 1), recorder, None)
        return _serve(engine, job, recorder, progress)
    finally:
        engine.close()


def _serve(engine: Engine, job: Job, recorder: Recorder, progress: Callable[[int, int], None] | None) -> Trial:
    counts, total = _Tokens(), job.n_sequences * job.gen_len
    prompts = np.random.default_rng(SEED).integers(engine.spec.vocab_size, size=(job.n_sequences, job.prompt_len))
    params = SamplingParams(temperature=0, max_tokens=job.gen_len, ignore_eos=True)
    waiting = [Request(f"trial-{i}", tuple(prompt), params) for i, prompt in enumerate(prompts.tolist())]
    for request in waiting:
        engine.add(engine.prepare(request, counts.take))
    recorder.restart()
    prefill_s = decode_s = 0.0
    decoded, most, shown = 0, 0, (0.0, 0.0)
    while engine.has_work:
        running, made, first, ended = engine.stats().running, counts.made, counts.first, counts.ended
        begun_s = recorder.now_s
        engine.step()
        end_s, tokens = recorder.now_s, counts.made - made
        joined = engine.stats().running + counts.ended - ended > running
        if joined or counts.first > first or tokens < running:
            prefill_s += end_s - begun_s
        else:
            decode_s, decoded = decode_s + end_s - begun_s, decoded + tokens
            if tokens >= most:
                most, shown = tokens, (begun_s, end_s)
        if progress:
            progress(counts.made, total)
    timeline = (*recorder.timeline, *_computing(recorder.timeline, recorder.now_s))
    return Trial(
        prefill_s=prefill_s,
        decode_s=decode_s,
        throughput=counts.made / (prefill_s + decode_s),
        decode_throughput=decoded / decode_s if decode_s else 0.0,
        latency_s=prefill_s + decode_s,
        timeline=timeline,
        shown_s=shown,
    )


def _computing(timeline: list[Busy], end_s: float) -> list[Busy]:
    """When the engine's thread did not wait."""
    found, at_s = [], 0.0
    for waited in sorted((busy for busy in timeline if busy.resource == "waiting"), key=lambda busy: busy.start_s):
        if waited.start_s > at_s:
            found.append(Busy("device", at_s, waited.start_s, "computing"))
        at_s = max(at_s, waited.end_s)
    return [*found, Busy("device", at_s, end_s, "computing")]
