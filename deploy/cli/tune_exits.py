"""``helios tune-exits``: heads for early exits of a model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.table import Table

from engine.errors import ConfigError
from engine.files import check_target

from .options import AsJson
from .terminal import Terminal

if TYPE_CHECKING:
    from engine.spec import ExitKind
    from engine.tuning.tune import Result

Choice = TypeVar("Choice", bound=str)
HEADS: "Sequence[ExitKind]" = ("norm", "adapter", "block")
GENERATED = 200_000
"""Tokens that the model says itself where no text is given."""


def tune_exits(
    model: Annotated[str, typer.Argument(help="A name in the model store, or a directory.")],
    exits: Annotated[
        str | None, typer.Option(help="Layers after which tokens may leave: 10,15,20,25; default: four of them.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text to learn from, .txt or .jsonl; may be repeated. Default: its own.")
    ] = None,
    generate: Annotated[
        int | None, typer.Option(help=f"Tokens that the model says itself to learn from; {GENERATED:,} without --text.")
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(help="norm, adapter or block; may be repeated to compare them: the first is written."),
    ] = None,
    loss: Annotated[str, typer.Option(help="kl, to the last layer, or cross-entropy, of its likeliest token.")] = "kl",
    width: Annotated[int, typer.Option(help="Of an adapter's MLP.")] = 1152,
    epochs: Annotated[int, typer.Option(help="Passes over the text.")] = 3,
    learning_rate: Annotated[float, typer.Option(help="At its highest.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of text, training and what is held out.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Compute threads; default: all cores.")] = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(help="Where states and finished heads are kept, to resume; default: in the model."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The file of heads; default: exits.safetensors in the model.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train heads for early exits: the model stays as it is, each exit learns to say what the last layer says.

    What was done is kept in the work folder, so the same command goes on where it was stopped.

    Examples:

        helios tune-exits smollm2-135m-instruct

        helios tune-exits ./my-model --exits 8,16 --text articles.jsonl --epochs 5

        helios tune-exits smollm2-135m-instruct --generate 500000 -o heads.safetensors --json

        helios tune-exits smollm2-135m-instruct --head adapter --head norm --head block
    """
    from engine.checkpoint.store import resolve
    from engine.exits.heads import FILE
    from engine.spec import ModelSpec
    from engine.tuning.train import LOSSES, Settings
    from engine.tuning.tune import check_layers, default_layers, figures, tune, work_config

    from ..models.cli import progress

    directory = resolve(model)
    spec = ModelSpec.from_directory(directory)
    layers = default_layers(spec) if exits is None else _layers(exits)
    check_layers(spec, layers)
    for name, value in (("width", width), ("epochs", epochs), ("generate", generate)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    kinds = [one_of("head", kind, HEADS) for kind in head or ["adapter"]]
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"head is given as {', '.join(kinds)}; name each kind once")
    if not 0 < learning_rate <= 1:
        raise ConfigError(f"learning-rate is {learning_rate:g}; it must be above 0 and at most 1")
    check_target(out or directory / FILE)
    config = work_config(model, threads)
    folder = work_dir or directory / "tune-exits"
    with progress() as report:
        results = tune(
            config,
            layers,
            lambda: _windows(model, text or [], generate, seed, threads, lambda d, t: report("text", d, t)),
            folder,
            out or directory / FILE,
            kinds=kinds,
            width=width,
            settings=Settings(epochs=epochs, learning_rate=learning_rate, seed=seed, loss=one_of("loss", loss, LOSSES)),
            progress=report,
        )
    if as_json:
        typer.echo(json.dumps({"out": str(out or directory / FILE), "exits": figures(results)}))
    else:
        _show(results, out or directory / FILE)


def one_of(name: str, given: str, known: Sequence[Choice]) -> Choice:
    for choice in known:
        if given == choice:
            return choice
    raise ConfigError(f"{name} is '{given}'; it must be one of {', '.join(known)}")


def _layers(given: str) -> list[int]:
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise ConfigError(f"exits is '{given}'; write layers as 10,15,20") from None


def _windows(
    model: str,
    text: Sequence[Path],
    generate: int | None,
    seed: int,
    threads: int | None,
    report: Callable[[int, int], None],
) -> list[list[int]]:
    from engine.checkpoint.store import resolve
    from engine.text.tokenizer import Tokenizer
    from engine.tuning.text import own_windows, read_texts, windows
    from engine.tuning.tune import work_config

    found = list(windows(Tokenizer.load(resolve(model)), read_texts(text)))
    wanted = generate or (0 if text else GENERATED)
    if wanted:
        config = replace(work_config(model, threads), context=512)
        found += own_windows(config, wanted, seed=seed, progress=lambda done: report(done, wanted))
    return found


def _show(results: "Sequence[Result]", out: Path) -> None:
    terminal = Terminal()
    table = Table("exit", "head", "agreement", "threshold", "satisfied", "ECE", "cost", "worth it")
    for found in results:
        own = found.at_thresholds.get("calibrated")
        table.add_row(
            str(found.layer),
            f"{found.kind}, {found.parameters / 1e6:.1f} M",
            f"{found.agreement:.1%}",
            "none" if found.threshold is None else f"{found.threshold:g}",
            f"{own[0]:.0%}" if own else "",
            f"{found.calibration_error:.3f}",
            f"{found.cost_layers:.2f} layers",
            "yes" if found.recommended else "no",
        )
    terminal.print(table)
    names = [name for name in results[0].at_thresholds if name != "calibrated"]
    sure = Table("exit", *names, title="Held-out tokens of that confidence, and how many agree", title_justify="left")
    for found in results:
        shares = (found.at_thresholds[name] for name in names)
        sure.add_row(str(found.layer), *(f"{share:.0%}, {agrees:.0%}" for share, agrees in shares))
    terminal.print(sure)
    terminal.print(f"written: {out}; `--set depth=N` runs the model up to exit N")
