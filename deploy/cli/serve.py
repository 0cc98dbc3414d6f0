"""``helios serve``: an app in the foreground until Ctrl-C, or detached."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.config import format_bytes

from . import options as o

if TYPE_CHECKING:
    from actors.config import AppConfig

    from ..serving import Started

POLL_S = 1.0


def serve(
    config: o.Config = None,
    model: o.Model = None,
    host: Annotated[str | None, typer.Option(help="Interface to listen on; 0.0.0.0 is all.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    app: o.App = None,
    ray_address: o.RayAddress = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once it answers.")] = False,
    device: o.Device = None,
    dtype: o.Dtype = None,
    memory: o.Memory = None,
    context: o.Context = None,
    max_sequences: o.MaxSequences = None,
    threads: o.Threads = None,
    pairs: o.Set = None,
) -> None:
    """Serve models over HTTP, by the OpenAI protocol. Flags override the configuration file.

    Examples:

        helios serve --model smollm2-135m-instruct

        helios serve config.yaml --port 9000 --detach
    """
    engine = o.settings(
        pairs,
        device=device,
        dtype=dtype,
        memory=memory,
        context=context,
        max_sequences=max_sequences,
        threads=threads,
    )
    http = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    settings = configuration(config, model, engine, http, o.given(app=app, ray_address=ray_address))
    started = _start(settings, detach)
    if detach:
        _introduce(started, settings)
    else:
        _stay(settings, started)


def configuration(
    file: Path | None, model: str | None, engine: dict[str, Any], http: dict[str, Any], top: dict[str, Any]
) -> "AppConfig":
    """The file's configuration, or that of one model, with flags over it. Raises ConfigError."""
    from actors.config import load_config
    from engine.checkpoint.store import DEFAULT_MODEL

    if file is not None and model is not None:
        raise typer.BadParameter("--model is for serving without a file; put it into the file's list of models")
    if file is not None:
        data = load_config(file).model_dump()
    else:
        path = model or DEFAULT_MODEL
        data = {"models": [{"name": Path(path).expanduser().resolve().name, "path": path}], "http": {}}
    data["models"] = [entry | engine for entry in data["models"]]
    data["http"] |= http
    return load_config(data | top)


def _start(config: "AppConfig", detach: bool) -> "Started":
    from .. import preflight, serving, state

    preflight.check_app(config)
    address = state.detached_address(config) or preflight.claim_address(config.http)
    typer.echo(f"loading {', '.join(model.name for model in config.models)} …", err=True)
    return serving.start(config, address, detach)


def _introduce(started: "Started", config: "AppConfig") -> None:
    for info in started.report.models:
        held = format_bytes(sum(size for use, size in info.memory.items() if use != "capacity"))
        typer.echo(f"{info.name}: {info.dtype} on {info.device}, context {info.context}, {held} in {info.load_s:.1f} s")
    url = started.record.address.url
    body = f'{{"model": "{config.models[0].name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    typer.echo(f"\nHelios serves at {url}. Try:\n")
    typer.echo(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n")


def _stay(config: "AppConfig", started: "Started") -> None:
    """Until an interrupt, which stops the app, or until it was stopped from elsewhere."""
    from .. import serving, state

    try:
        _introduce(started, config)
        while state.read_record(config.app) == started.record:
            serving.must_be_alive(config)
            time.sleep(POLL_S)
        typer.echo(f"'{config.app}' was stopped by another command", err=True)
    except (KeyboardInterrupt, BrokenPipeError):
        typer.echo("stopping …", err=True)
        for item in serving.stop(config.app, config.ray_address, drain_s=serving.DRAIN_S):
            typer.echo(f"stopped {item}", err=True)
