"""What compression costs: perplexity on WikiText-2, memory and decode speed of each way to store weights and KV.

Windows of text are decoded together, teacher-forced, one position a sweep, so that every K and V passes through the
cache and top-K sparse attention takes part. Text: ``wikitext2/test.txt`` of the data folder (CC BY-SA 4.0).
"""

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor

from benchmarks.report import Report, parser, show
from engine.batch import Share
from engine.build import build
from engine.checkpoint.store import resolve
from engine.config import EngineConfig, format_bytes
from engine.engine import Engine
from engine.passes.choose import sink, source
from engine.quant.copy import quantise_model
from engine.quant.format import Quantisation
from engine.quant.scheme import Bits, Dim, Scheme
from engine.request import Request, SamplingParams
from engine.sweep import Sweep

matplotlib.use("Agg")
from matplotlib import pyplot as plt


@dataclass(frozen=True, slots=True)
class Way:
    """A way to store the model."""

    name: str
    weights: Scheme | None = None
    settings: tuple[tuple[str, Any], ...] = ()


def ways() -> list[Way]:
    def coded(bits: Bits, group: int, dim: Dim) -> Scheme:
        return Scheme(bits, group, dim)

    return [
        Way("float32", settings=(("dtype", "float32"),)),
        Way("bfloat16"),
        Way("int8, groups of 64 along the input", coded(8, 64, "input")),
        Way("int4, groups of 64 along the input", coded(4, 64, "input")),
        Way("int4, groups of 64 along the output", coded(4, 64, "output")),
        Way("int4, groups of 32 along the input", coded(4, 32, "input")),
        Way("int4 KV", settings=(("kv_dtype", "int4"),)),
        Way("int4 KV, 10 % of V", settings=(("kv_dtype", "int4"), ("value_share", 0.1))),
        Way("int4 weights (64, input), int4 KV", coded(4, 64, "input"), (("kv_dtype", "int4"),)),
        Way(
            "int4 weights (64, input), int4 KV, 10 % of V",
            coded(4, 64, "input"),
            (("kv_dtype", "int4"), ("value_share", 0.1)),
        ),
    ]


def windows(directory: Path, data: str | None, count: int, length: int) -> list[list[int]]:
    """Windows of the text, ``length`` tokens each, one after another."""
    folder = data or os.environ.get("HELIOS_DATA")
    path = Path(folder or ".") / "wikitext2" / "test.txt"
    if not path.is_file():
        raise SystemExit(f"{path} does not exist; name the data folder with --data or HELIOS_DATA")
    engine = Engine.load(EngineConfig(str(directory), max_sequences=1, context=64))
    ids = engine.tokenizer.encode(path.read_text(encoding="utf-8")[: count * length * 8])
    engine.close()
    if len(ids) < count * length:
        raise SystemExit(f"{path} has {len(ids)} tokens; {count} windows of {length} need {count * length}")
    return [ids[i * length : (i + 1) * length] for i in range(count)]


@dataclass(slots=True)
class Measured:
    perplexity: float
    tokens: int
    decode: float
    """Positions a second, all windows together."""
    weights: int
    kv_per_token: float
    """Bytes."""


def measure(directory: Path, way: Way, texts: list[list[int]], threads: int | None) -> Measured:
    """Decode all windows, each position given the true text before it."""
    length = len(texts[0])
    config = EngineConfig(
        str(directory),
        max_sequences=len(texts),
        context=length,
        kv_tokens=len(texts) * (length + 16),
        threads=threads,
        **dict(way.settings),
    )
    parts = build(config)
    engine = Engine(parts)
    layers = range(parts.spec.n_layers)
    sequences = []
    for i, text in enumerate(texts):
        sequence = engine.prepare(Request(str(i), tuple(text[:-1]), SamplingParams(max_tokens=1)), lambda _: None)
        sequence.home = parts.homes[0]
        sequence.blocks = sequence.home.pool.take(-(-length // 16))
        sequences.append(sequence)
    total = torch.zeros((), dtype=torch.float64)
    started = time.perf_counter()
    for position in range(length - 1):
        shares = [Share(sequence, position, 1, 1) for sequence in sequences]
        logits = parts.executor.run(Sweep(position, layers, shares, source(parts), sink(parts)))
        total += _negative_log_likelihood(logits, [text[position + 1] for text in texts])
    seconds = time.perf_counter() - started
    memory = engine.stats().memory
    count = len(texts) * (length - 1)
    kv = memory["kv"] / (parts.homes[0].pool.n_blocks * 16)
    engine.close()
    return Measured(float((total / count).exp()), count, count / seconds, memory["weights"], kv)


def _negative_log_likelihood(logits: Tensor, targets: list[int]) -> Tensor:
    rows = torch.log_softmax(logits.float(), -1)
    return -rows[torch.arange(len(targets)), targets].double().sum()


def main(argv: list[str] | None = None) -> None:
    arguments = parser("quality", __doc__ or "")
    arguments.add_argument("--model", default="smollm2-135m-instruct")
    arguments.add_argument("--windows", type=int, default=64)
    arguments.add_argument("--length", type=int, default=256)
    arguments.add_argument("--threads", type=int)
    args = arguments.parse_args(argv)
    if args.quick:
        args.windows, args.length = 8, 64
    report = Report("quality", args)
    source = resolve(args.model)
    texts = windows(source, args.data, args.windows, args.length)
    found: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as folder:
        copies: dict[Scheme, Path] = {}
        for way in ways():
            if way.weights and way.weights not in copies:
                copies[way.weights] = Path(folder) / f"copy{len(copies)}"
                quantise_model(source, copies[way.weights], Quantisation(way.weights))
            directory = copies[way.weights] if way.weights else source
            found[way.name] = measure(directory, way, texts, args.threads)
            print(f"{way.name}: perplexity {found[way.name].perplexity:.2f}", flush=True)
    report.figures = {
        "model": args.model,
        "windows": args.windows,
        "length": args.length,
        "ways": {name: {field: getattr(m, field) for field in Measured.__slots__} for name, m in found.items()},
    }
    table(found)
    draw(report, found)
    report.finish()


def table(found: dict[str, Measured]) -> None:
    exact = found["float32"].perplexity
    rows = [
        [
            name,
            f"{m.perplexity:.2f}",
            f"{100 * (m.perplexity / exact - 1):+.1f} %",
            format_bytes(m.weights),
            f"{m.kv_per_token / 1024:.1f}",
            f"{m.decode:.0f}",
        ]
        for name, m in found.items()
    ]
    columns = ["stored as", "perplexity", "against float32", "weights", "KV, KiB a token", "positions/s"]
    show(f"{next(iter(found.values())).tokens} positions of WikiText-2", columns, rows)


def draw(report: Report, found: dict[str, Measured]) -> None:
    """Memory against perplexity."""
    figure, axes = plt.subplots(figsize=(9, 5))
    for name, m in found.items():
        axes.scatter(m.weights / 2**20, m.perplexity)
        axes.annotate(name, (m.weights / 2**20, m.perplexity), fontsize=7, xytext=(4, 4), textcoords="offset points")
    axes.set_xlabel("weights, MiB")
    axes.set_ylabel("perplexity, lower is better")
    Path(report.args.out).mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(report.picture, dpi=120)


if __name__ == "__main__":
    main()
