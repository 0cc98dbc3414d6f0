"""``helios profile``: measure this machine, for plans made from its own figures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from engine.config import format_bytes
from engine.errors import ConfigError
from engine.files import check_target
from engine.planner.hardware import Hardware
from engine.planner.processor import Curve

from ..models.cli import progress
from .options import AsJson
from .terminal import Terminal

_PREFIXES = ("", "k", "M", "G", "T", "P")


def profile(
    quick: Annotated[
        bool, typer.Option("--quick", help="Half a minute instead of one and a half, and less exact.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Show the stored profile; measure nothing.")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write to this file instead of $HELIOS_HOME/hardware.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    offload_dir: Annotated[
        Path | None, typer.Option(help="A directory on the disk to measure; the one that is offloaded to by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine: products, attention, memory, disk and links, by what the engine itself runs.

    Plans are made from these figures. Let nothing else run meanwhile. The disk is measured with a file of 1 GiB
    (256 MiB with --quick), which is gone afterwards.

    Examples:

        helios profile

        helios profile --quick --offload-dir /mnt/nvme -o nvme.yaml

        helios profile --show --json
    """
    if show:
        _refuse_beside_show(quick=quick, out=out, device=device, offload_dir=offload_dir)
        _show_stored(as_json)
        return
    from engine.planner.profile.machine import profile_machine
    from engine.planner.profile.store import profile_path

    path = profile_path() if out is None else out.expanduser()
    check_target(path, "choose another file with -o")  # before a minute is spent
    with progress() as report:
        measured = profile_machine(
            device or "auto",
            offload_dir=offload_dir,
            quick=quick,
            progress=lambda step, done, total: report(f"measuring {step}" if total else step, done, total),
        )
    measured.save(path)
    _say(measured, path, None, as_json)


def _refuse_beside_show(**others: object) -> None:
    for name, value in others.items():
        if value:
            raise ConfigError(f"--show measures nothing, so --{name.replace('_', '-')} says nothing; leave one out")


def _show_stored(as_json: bool) -> None:
    from engine.planner.profile.identity import why_stale
    from engine.planner.profile.store import profile_path, stored_profile

    stored = stored_profile()
    if stored is None:
        raise ConfigError(f"there is no profile of this machine in {profile_path()}; make one with `helios profile`")
    _say(stored, profile_path(), why_stale(stored), as_json)


def _say(hardware: Hardware, path: Path, stale: str | None, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"path": str(path), "stale": stale, "hardware": hardware.to_dict()}))
        return
    terminal = Terminal()
    typer.echo(f"{hardware.name}: {hardware.description}")
    for where, processor in (("device", hardware.device), ("host", hardware.host)):
        if processor is not None:
            typer.echo(f"\nproducts of the {where}, FLOP/s")
            terminal.print(_products(processor.products))
    terminal.print(_rest(hardware))
    typer.echo(f"in {path}")
    if stale:
        typer.echo(f"warning: {stale}", err=True)


def _products(products: Mapping[str, Curve]) -> Table:
    table = _table("rows", *products)
    sizes = sorted({size for curve in products.values() for size, _ in curve.points})
    for size in sizes:
        rates = (dict(curve.points).get(size) for curve in products.values())
        table.add_row(f"{size:.0f}", *("" if rate is None else _short(rate) for rate in rates))
    return table


def _rest(hardware: Hardware) -> Table:
    table = _table("figure", "value")
    for name, figure in hardware.figures().items():
        if ".products." in name:
            continue
        if isinstance(figure, Curve):
            for size, rate in figure.points:
                table.add_row(*_point(name, size, rate))
        else:
            table.add_row(name, _readable(name, figure))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name == "figure" else "right", no_wrap=True)
    return table


def _point(path: str, size: float, rate: float) -> tuple[str, str]:
    if path.endswith("decode_attention"):
        return f"{path}, {format_bytes(size)} a call", f"{format_bytes(rate)}/s"
    if path.endswith("chunk_attention"):
        return f"{path}, {_short(size)}FLOP a call", f"{_short(rate)}FLOP/s"
    return f"{path}, {size:.0f} rows", f"{rate:.2f}"  # a ratio of rates


def _readable(path: str, figure: float) -> str:
    name = path.rpartition(".")[2]
    if name == "expand_elements_s":
        return f"{_short(figure)}elements/s"
    if name == "read_cpu_s":
        return f"{figure * 2**30:.3f} s/GiB"
    if name.endswith("_s") and name != "memory_bytes_s":
        return f"{figure * 1e6:.1f} us"
    return format_bytes(figure) + ("" if name.endswith("_bytes") else "/s")


def _short(rate: float) -> str:
    """A rate with a prefix: "215 G"."""
    power = 0
    while rate >= 1000 and power + 1 < len(_PREFIXES):
        rate, power = rate / 1000, power + 1
    return f"{rate:.3g} {_PREFIXES[power]}"
