"""``helios demo``: the whole of it once, from an empty store to an answered prompt, and everything stopped again."""

import time
from typing import Annotated, Any

import typer
from rich.table import Table

from engine.config import format_bytes

from . import options as o
from .sources import Piece, Server, get_json
from .terminal import Terminal

APP = "demo"
PROMPT = "Why is the sky blue? Answer in two sentences."
MAX_TOKENS = 96


def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = PROMPT,
    model: o.Model = None,
    dtype: o.Dtype = None,
) -> None:
    """Get the default model if it is not here, serve it, answer a prompt, show what happened, and stop.

    Examples:

        helios demo

        helios demo "Write a haiku about rivers"
    """
    from actors.config import load_config
    from engine.checkpoint.store import DEFAULT_MODEL

    from .. import preflight, serving
    from ..models.cli import pull

    console = Terminal()
    name = model or DEFAULT_MODEL
    console.rule("1. The model")
    pull(name)
    engine = o.given(dtype=dtype)
    config = load_config({"app": APP, "models": [{"name": name, **engine}], "http": {"port": 0}})
    console.rule("2. Ray, the router, the model's actor and the HTTP service")
    preflight.check_app(config)
    started_s = time.perf_counter()
    try:
        started = serving.start(config, preflight.claim_address(config.http), detached=False)
        console.print(f"answers at {started.record.address.url} after {time.perf_counter() - started_s:.1f} s")
        console.rule("3. A prompt, over the OpenAI protocol")
        console.print(f"[bold]{prompt}[/bold]")
        told = _ask(Server(started.record.address.url, "auto"), prompt)
        console.rule("4. What happened")
        console.print(_table(told, get_json(started.record.address.url, "/status")))
    finally:
        console.rule("5. Stopping")
        for item in serving.stop(APP):
            console.print(f"stopped {item}")
    console.print(f"\nNext: [bold]helios serve --model {name}[/bold], or [bold]helios --help[/bold]")


def _ask(server: Server, prompt: str) -> dict[str, str]:
    """Stream the answer to the terminal; returns what was measured on the way, by name."""
    begun_s, first_s, last = time.perf_counter(), None, Piece("")
    messages = [{"role": "user", "content": prompt}]
    for last in server.stream(messages, {"max_tokens": MAX_TOKENS, "temperature": 0.0}):
        first_s = first_s or time.perf_counter()
        typer.echo(last.text, nl=False)
    typer.echo()
    ended_s, usage = time.perf_counter(), last.usage
    if first_s is None or usage is None:
        return {"answer": "empty"}
    speed = (usage.completion_tokens - 1) / (ended_s - first_s)
    return {
        "prompt": f"{usage.prompt_tokens} tokens",
        "answer": f"{usage.completion_tokens} tokens, ended by {last.finish_reason}",
        "time to first token": f"{(first_s - begun_s) * 1e3:.0f} ms",
        "speed after that": f"{speed:.0f} tokens/s",
    }


def _table(told: dict[str, str], status: dict[str, Any]) -> Table:
    """The client's own measurements, then what the actor and the router say."""
    table = Table(show_header=False)
    for name, value in told.items():
        table.add_row(name, value)
    replica = status["models"][0]["replicas"][0]
    info, stats = replica["info"], replica["stats"]
    tokens = stats["generated_tokens"]
    table.add_row("chosen by the router", status["models"][0]["model"])
    table.add_row("model actor", f"{info['n_layers']} layers, {info['dtype']} on {info['device']}, pid {info['pid']}")
    table.add_row("sweeps", f"{stats['sweeps']} in {stats['busy_s']:.2f} s")
    table.add_row("mean confidence", f"{stats['sum_confidence'] / tokens:.2f}" if tokens else "-")
    for use, size in stats["memory"].items():
        table.add_row(f"memory, {use}", format_bytes(size))
    return table
