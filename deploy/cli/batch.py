"""``helios batch``: a file of prompts through a model loaded here."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.errors import ConfigError

from . import options as o
from .generate import MAX_TOKENS
from .group import fail
from .sources import load_llm, local_params

if TYPE_CHECKING:
    from ..batch.run import BatchRun
    from ..batch.run import Progress as BatchProgress


def batch(
    lines: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="One JSON object a line.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where results are appended; an interrupted run goes on.")],
    model: o.Model = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    max_tokens: o.MaxTokens = MAX_TOKENS,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    min_p: o.MinP = None,
    seed: o.Seed = None,
    stop: o.Stop = None,
    repetition_penalty: o.RepetitionPenalty = None,
    ignore_eos: o.IgnoreEos = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
    memory: o.Memory = None,
    context: o.Context = None,
    max_sequences: o.MaxSequences = None,
    threads: o.Threads = None,
    pairs: o.Set = None,
) -> None:
    """Run every line of a file, in whatever order they finish.

    A line has "prompt", "messages" or "prompt_ids", or is one of OpenAI's batch API ("custom_id", "url", "body"). It
    may have "id", sampling fields such as "temperature", and fields of your own, which are copied to its result. After
    an interrupt the same command goes on where it was: finished lines are kept. A line that cannot be run gets a
    result with "error", and the exit status is then 1.

    Examples:

        helios batch prompts.jsonl -o results.jsonl --max-tokens 64 -t 0

        helios batch prompts.jsonl -o results.jsonl --memory 2GiB --max-sequences 64 --set kv_disk_tokens=20000

        echo '{"id": 1, "prompt": "Hello"}' > in.jsonl && helios batch in.jsonl -o out.jsonl
    """
    from engine.checkpoint.store import DEFAULT_MODEL

    from ..batch.lines import count_lines
    from ..batch.output import Output
    from ..batch.run import BatchRun

    sampling = o.given(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop,
        repetition_penalty=repetition_penalty,
        ignore_eos=ignore_eos,
    )
    defaults = local_params(sampling)
    engine = o.settings(
        pairs,
        device=device,
        dtype=dtype,
        memory=memory,
        context=context,
        max_sequences=max_sequences,
        threads=threads,
    )
    if out.exists() and lines.exists() and out.samefile(lines):
        raise ConfigError(f"{out} is the input too; choose another output file")
    count_lines(lines)  # before the model is loaded: a file that is not there shows at once, and so does a wrong output
    with Output(out) as output:
        run = BatchRun(load_llm(model or DEFAULT_MODEL, engine), lines, output, defaults)
        summary = _watched(run)
    _summarise(summary, lines, out, as_json)


def _watched(run: "BatchRun") -> dict[str, float]:
    """The run with a progress bar on stderr. An interrupt says how to go on."""
    started = time.perf_counter()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[rate]:.1f} tokens/s"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=run.progress.total, rate=0.0)

        def report(now: "BatchProgress") -> None:
            bar.update(task, completed=now.done, rate=now.tokens / (time.perf_counter() - started))

        try:
            run.run(report)
        except KeyboardInterrupt:
            bar.stop()
            typer.echo(f"stopped at {run.progress.done} of {run.progress.total}; run it again to go on", err=True)
            raise
    return asdict(run.progress) | {"seconds": time.perf_counter() - started}


def _summarise(summary: dict[str, float], lines: Path, out: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(summary))
    elif summary["resumed"] == summary["total"]:
        typer.echo(f"nothing to do: {out} has the results of all {summary['total']:.0f} lines of {lines}")
    else:
        speed = summary["tokens"] / summary["seconds"]
        earlier = f", {summary['resumed']:.0f} of them from an earlier run" if summary["resumed"] else ""
        typer.echo(
            f"{out} has the results of all {summary['done']:.0f} lines of {lines}{earlier}; "
            f"{summary['tokens']:.0f} tokens at {speed:.1f} tokens/s"
        )
    if summary["failed"]:
        fail(f"{summary['failed']:.0f} of {summary['total']:.0f} lines failed; their results in {out} say why")
