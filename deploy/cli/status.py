"""``helios status``."""

import json
from typing import Any

import typer
from rich import box
from rich.table import Table

from engine.config import format_bytes

from ..state import DEFAULT_APP, not_running, running_url
from . import options as o
from .sources import get_json
from .terminal import Terminal

_COLUMNS = ("model", "#", "state", "restarts", "run", "wait", "tokens", "tok/s", "KV blocks", "memory")


def status(url: o.Url = None, app: o.AppOrDefault = DEFAULT_APP, as_json: o.AsJson = False) -> None:
    """Show the models of a running app: state, queue, tokens, speed, KV cache and memory.

    Tokens and speed are those since the replica was started last.

    Examples:

        helios status

        helios status --url http://10.0.0.5:8000 --json
    """
    found = url or running_url(app)
    if found is None:
        raise not_running(app)
    report = get_json(found, "/status")
    if as_json:
        typer.echo(json.dumps(report))
        return
    Terminal().print(_table(report, found))
    if error := report.get("error"):
        typer.echo(error, err=True)


def _table(report: dict[str, Any], url: str) -> Table:
    streams = report["streams"]
    title = f"{report['app']} at {url}, {streams['open']} of {streams['limit']} places taken"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("model", "state") else "right", no_wrap=True)
    for model in report["models"]:
        for replica in model["replicas"]:
            table.add_row(model["model"], *_row(replica))
    return table


def _row(replica: dict[str, Any]) -> tuple[str, ...]:
    """The replica's own numbers; the router's, which are a report old, where it does not answer."""
    stats = replica.get("stats", {})
    queue = {**replica, **stats}
    numbers = (str(queue[name]) for name in ("restarts", "running", "waiting"))
    first = (str(replica["replica"]), replica["state"], *numbers)
    if not stats:
        return *first, replica.get("error", "")
    tokens, busy_s = stats["generated_tokens"], stats["busy_s"]
    held = sum(size for use, size in stats["memory"].items() if use != "capacity")
    return (
        *first,
        str(tokens),
        f"{tokens / busy_s:.1f}" if busy_s else "-",
        f"{stats['kv_blocks_used']}/{stats['kv_blocks_total']}",
        format_bytes(held),
    )
