"""``helios plan``: how to run a model on a machine, and how fast that will be."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from engine.config import format_bytes
from engine.errors import ConfigError
from engine.files import check_target

from .options import AsJson
from .terminal import Terminal, native_output_apart

if TYPE_CHECKING:
    from engine.planner.plan import Plan
    from engine.planner.task import Task
    from engine.planner.trial import Trial

_JOB, _LIMITS = "Job", "Limits"
DEFAULTS = {"prompt-len": 512, "gen-len": 32, "sequences": 256}
PICTURES = (".png", ".svg", ".pdf")
ALWAYS = ("prefill_rows", "schedule", "kv_dtype", "delegate")
"""Settings that are shown even where a plan leaves the default."""


def plan(
    model: Annotated[str, typer.Argument(help="A name in the model store, or a directory with a config.json.")],
    hardware: Annotated[
        str | None,
        typer.Option(help="A built-in machine (t4, a100-80gb, …) or a file; default: what `helios profile` measured."),
    ] = None,
    prompt_len: Annotated[
        int | None, typer.Option(help="Tokens of a prompt; default: 512.", rich_help_panel=_JOB)
    ] = None,
    gen_len: Annotated[
        int | None, typer.Option(help="New tokens for each prompt; default: 32.", rich_help_panel=_JOB)
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(help="Prompts there are; default: 256.", rich_help_panel=_JOB)
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Memory of the device to use: 2GiB.", rich_help_panel=_LIMITS)
    ] = None,
    host_budget: Annotated[
        str | None, typer.Option(help="Memory of the host to use beside it.", rich_help_panel=_LIMITS)
    ] = None,
    disk_budget: Annotated[str | None, typer.Option(help="Disk space to use.", rich_help_panel=_LIMITS)] = None,
    latency_limit: Annotated[
        float | None, typer.Option(help="Seconds until a block's last token.", rich_help_panel=_LIMITS)
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.")] = None,
    quantize: Annotated[
        Literal["4", "8"] | None, typer.Option(help="As if the layers' weights were in 4 or 8 bits.")
    ] = None,
    kv_int4: Annotated[bool, typer.Option("--kv-int4", help="KV may be kept in 4 bits.")] = False,
    depth: Annotated[int | None, typer.Option(help="Only the layers up to this one.")] = None,
    stages: Annotated[int, typer.Option(help="Machines that share the layers, one after another.")] = 1,
    check: Annotated[
        Path | None, typer.Option(help="Try this plan on its own job, as it is or edited, instead of looking for one.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Save the plan.")] = None,
    trial: Annotated[
        bool, typer.Option("--try", help="Carry the plan out here, with random prompts, and measure it.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw a sweep's timeline, with --try the real one's: a .png, .svg or .pdf.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find out how a model runs fastest on a machine: what lives where, how many sequences at once, in which order.

    The machine need not be at hand, and of the model only its config.json. Every plan is tried in simulation.

    Examples:

        helios plan smollm2-135m-instruct --budget 100MB --prompt-len 128 --gen-len 64

        helios plan ./opt-30b --hardware t4 --sequences 144 -o plan.yaml --picture sweep.png

        helios plan ./opt-30b --hardware t4 --check plan.yaml

        helios plan smollm2-135m-instruct --budget 250MB --sequences 8 --try --picture real.png
    """
    from engine.checkpoint.store import resolve
    from engine.planner.job import Job
    from engine.planner.plan import Plan
    from engine.planner.planner import check_plan, make_plan
    from engine.quant.format import Quantisation

    from ..models.cli import progress
    from .planning import task_of

    if trial and (hardware or quantize or depth or stages > 1):
        raise ConfigError(
            "--try runs the model as it is on this machine; leave out --hardware, --quantize, --depth and --stages"
        )
    if picture is not None and picture.suffix not in PICTURES:
        raise ConfigError(f"picture is '{picture}'; its name must end in {', '.join(PICTURES)}")
    for target in (out, picture):
        if target is not None:
            check_target(target)
    given = None if check is None else Plan.load(check)
    lengths = {"prompt-len": prompt_len, "gen-len": gen_len, "sequences": sequences}
    if given is None:
        job = Job(*(DEFAULTS[name] if value is None else value for name, value in lengths.items()))
    else:
        others: dict[str, Any] = {
            "budget": budget,
            "host-budget": host_budget,
            "disk-budget": disk_budget,
            "dtype": dtype,
        }
        others |= {"latency-limit": latency_limit, "quantize": quantize, "kv-int4": kv_int4 or None, "depth": depth}
        for name, value in {**lengths, **others}.items():
            if value is not None:
                raise ConfigError(f"--{name} says nothing beside --check, which tries the plan as it is; edit {check}")
        if given.model != model:
            typer.echo(f"warning: the plan was made for '{given.model}' and is tried for '{model}'", err=True)
        if trial and given.quantize and Quantisation.of(resolve(model)) is None:
            raise ConfigError(
                f"{check} is for a copy in {given.quantize} bits and '{model}' is not one; --try the copy that "
                "`helios quantize` makes"
            )
        job, depth = given.job, given.settings.get("depth")
    task = task_of(
        model,
        hardware,
        job,
        (budget, host_budget, disk_budget, latency_limit),
        dtype=dtype,
        bits=int(quantize) if quantize else given.quantize if given else None,
        kv_int4=kv_int4,
        depth=depth,
        stages=stages,
    )
    if given is not None:
        made = check_plan(given, task)
    else:
        with native_output_apart(), progress() as report:
            made = make_plan(task, lambda done, total: report("trying plans", done, total))
    made = replace(made, quantize=int(quantize) if quantize else made.quantize)
    if out is not None:
        made.save(out)
        typer.echo(f"written: {out}", err=True)
    measured = _carry_out(made, task) if trial else None
    if picture is not None:
        _draw(made, task, measured, picture)
    if as_json:
        content = made.to_dict() | ({"measured": measured.figures()} if measured else {})
        typer.echo(json.dumps(content, indent=2))
    else:
        _show(made, measured)


def _carry_out(made: "Plan", task: "Task") -> "Trial":
    from engine.planner.trial import carry_out

    from ..models.cli import progress

    config = made.config(task.base())
    block = task.block(config)
    with progress() as report:
        measured = carry_out(config, block, lambda done, total: report("carrying it out", done, total))
    return replace(measured, throughput=measured.throughput * task.fullness(block.n_sequences))


def _draw(made: "Plan", task: "Task", measured: "Trial | None", path: Path) -> None:
    from engine.planner.picture import draw
    from engine.planner.simulator.sample import predict_run

    if measured is not None:
        draw(measured.timeline, path, f"{made.model} here: a sweep", *measured.shown_s)
        return
    config = made.config(task.base())
    simulation = predict_run(config, task.sizes, task.hardware, task.block(config))
    part = " of some layers" if simulation.sampled else ""
    draw(simulation.timeline, path, f"{made.model} on {made.hardware}: a sweep{part}", *simulation.shown_s)


def _show(made: "Plan", measured: "Trial | None") -> None:
    terminal, found = Terminal(), made.prediction
    among = f", the best of {made.tried} ways to do it" if made.tried else ""
    terminal.print(f"[bold]{made.model}[/] on {made.hardware}: {made.summary()}{among}")
    settings = Table("setting", "value", title="Plan", title_justify="left")
    shown = {name: getattr(made.config(), name) for name in ALWAYS}
    for name, value in {**made.settings, **shown}.items():
        settings.add_row(name, _setting(name, value))
    terminal.print(settings)
    if found is None:
        return
    expected = Table("", "expected", *(["measured"] if measured else []), title="Speed", title_justify="left")
    for name, form in (
        ("throughput", "{0.throughput:.2f} tokens/s, {0.decode_throughput:.2f} in decode"),
        ("prefill, decode", "{0.prefill_s:.2f} s, {0.decode_s:.2f} s"),
        ("latency of a block", "{0.latency_s:.2f} s"),
    ):
        expected.add_row(name, form.format(found), *([form.format(measured)] if measured else []))
    expected.add_row("limited by", found.bound)
    terminal.print(expected)
    memory = Table("tier", "use", "bytes", title="Memory", title_justify="left")
    for tier, uses in found.memory.items():
        for use, size in uses.items():
            memory.add_row(tier, use, format_bytes(size))
    terminal.print(memory)
    for lost in made.rejected:
        terminal.print(f"not chosen: {lost.summary}: {lost.throughput:.2f} tokens/s, {lost.reason}")


def _setting(name: str, value: Any) -> str:
    if name == "weights" and value:
        return "; ".join(f"{tier}: {', '.join(names)}" for tier, names in value.items() if names)
    return format_bytes(value) if name.endswith("_bytes") and value is not None else str(value)
