"""What a sweep takes beside its products: a real engine decodes with models so small that nothing else is left."""

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ...config import EngineConfig
from ...device import Device
from ...engine import Engine
from ...request import Delta, Request, SamplingParams
from ...sampling import Sampler, SamplingRow
from .timing import Effort, Run, timed, usual_seconds
from .toy import CONTEXT, save_toy

DEPTHS = (2, 14)
"""Layers of the two models, whose difference is that of so many layers."""
ROWS = (1, 32)
"""Sequences that decode together."""
STEPS = 16
"""Sweeps that are timed together; the sequences stay short."""
VOCABULARY = 2**16
"""Of the logits that are sampled from; Llama 2 has 32,000 tokens, Qwen 2.5 has 151,936."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds; the fields are those of ``Processor``."""

    layer_s: float
    sweep_s: float
    row_s: float


def measure_overhead(config: EngineConfig, device: Device, effort: Effort) -> Overhead:
    """Fit the time of a sweep over L layers for R sequences by ``sweep_s + R * row_s + L * layer_s``.

    ``config`` says how an engine is to run, ``device`` is what that opens. The toy's vocabulary is small, so drawing
    from a usual one is timed apart.
    """
    with tempfile.TemporaryDirectory(prefix="helios-profile-") as folder, ExitStack() as opened:
        runs: dict[tuple[int, int], Run] = {}
        for depth in DEPTHS:
            model = save_toy(Path(folder) / str(depth), depth)
            for rows in ROWS:
                engine = Engine.load(
                    replace(config, model=str(model), max_sequences=rows, kv_tokens=rows * CONTEXT, prefill_rows=rows)
                )
                opened.callback(engine.close)
                runs[depth, rows] = partial(_decode, engine, rows)
        seconds = usual_seconds(runs, effort)
    shallow, deep = DEPTHS
    layers = {rows: (seconds[deep, rows] - seconds[shallow, rows]) / (deep - shallow) for rows in ROWS}
    without = {rows: max(0.0, seconds[shallow, rows] - shallow * layers[rows]) for rows in ROWS}
    one, many = ROWS
    row_s = max(0.0, without[many] - without[one]) / (many - one)
    return Overhead(
        layer_s=max(0.0, layers[one]),
        sweep_s=max(0.0, without[one] - row_s),
        row_s=row_s + _sampling_row_s(device, effort),
    )


def _decode(engine: Engine, rows: int) -> float:
    """Seconds of a sweep in which so many new sequences decode."""
    for number in range(rows):
        params = SamplingParams(seed=number, ignore_eos=True)
        engine.add(engine.prepare(Request(str(number), (number,), params), _raise_error))
    engine.step()  # the prompts, of one token each
    begun = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    seconds = (time.perf_counter() - begun) / STEPS
    for number in range(rows):
        engine.cancel(str(number))
    return seconds


def _raise_error(delta: Delta) -> None:
    if delta.error:
        raise delta.error


def _sampling_row_s(device: Device, effort: Effort) -> float:
    """Seconds that drawing a token takes for each further sequence."""
    one, many = ROWS
    sampler = Sampler(VOCABULARY, device.torch_device)
    logits = device.from_host(torch.randn(many, VOCABULARY).to(device.dtype))
    rows = [SamplingRow(SamplingParams(seed=number), position=1) for number in range(many)]
    runs = {count: timed(device, partial(sampler.sample, logits[:count], rows[:count])) for count in ROWS}
    seconds = usual_seconds(runs, effort)
    return max(0.0, seconds[many] - seconds[one]) / (many - one)
