"""Command-line options that several commands share. What is not given stays out, so defaults live in one place."""

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from engine.errors import ConfigError

_SAMPLING = "Sampling"
_ENGINE = "Engine"

Model = Annotated[
    str | None, typer.Option("--model", "-m", help="A name in the model store, or a Hugging Face directory.")
]
Url = Annotated[
    str | None, typer.Option("--url", envvar="HELIOS_URL", help="A running server, such as http://127.0.0.1:8000.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Config = Annotated[Path | None, typer.Argument(metavar="[CONFIG.yaml]", help="The configuration file.")]
App = Annotated[str | None, typer.Option("--app", help="Name of the app; a Ray serves one over HTTP.")]
AppOrDefault = Annotated[str, typer.Option("--app", help="Name of the app.")]
RayAddress = Annotated[str | None, typer.Option(help="A Ray cluster to use: host:port, or auto.")]

MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", "-n", help="Tokens to generate at most.", rich_help_panel=_SAMPLING)
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[float | None, typer.Option(help="Likeliest tokens up to this mass.", rich_help_panel=_SAMPLING)]
TopK = Annotated[int | None, typer.Option(help="So many likeliest tokens.", rich_help_panel=_SAMPLING)]
MinP = Annotated[float | None, typer.Option(help="At least this share of the best.", rich_help_panel=_SAMPLING)]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.", rich_help_panel=_SAMPLING)]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.", rich_help_panel=_SAMPLING)
]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1 repeats less.", rich_help_panel=_SAMPLING)]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after the model's end of text.", rich_help_panel=_SAMPLING)
]

Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=_ENGINE)]
Dtype = Annotated[str | None, typer.Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=_ENGINE)]
Memory = Annotated[
    str | None, typer.Option(help="Limit on weights, KV cache and workspaces: 2GiB.", rich_help_panel=_ENGINE)
]
Context = Annotated[int | None, typer.Option(help="Longest prompt and output together.", rich_help_panel=_ENGINE)]
MaxSequences = Annotated[int | None, typer.Option(help="Sequences in one sweep at most.", rich_help_panel=_ENGINE)]
Threads = Annotated[int | None, typer.Option(help="Compute threads on a CPU.", rich_help_panel=_ENGINE)]


Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any other key of a model's configuration (docs/helios.yaml), such as kv_disk_tokens=200000 or "
        "schedule=diagonal; may be repeated.",
        rich_help_panel=_ENGINE,
    ),
]


def settings(pairs: list[str] | None, **flags: Any) -> dict[str, Any]:
    """The engine flags that were set and the pairs of --set, as a configuration names them. Raises ConfigError."""
    found = given(**flags)
    for pair in pairs or []:
        key, equals, text = pair.partition("=")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            equals = ""
        if not equals or not key:
            raise ConfigError(f"--set is '{pair}'; write it as KEY=VALUE, such as kv_dtype=int4")
        found[key] = value
    return found


def given(**flags: Any) -> dict[str, Any]:
    """The flags that were set, as a request or a configuration names them."""
    return {name: value for name, value in flags.items() if value is not None and value is not False and value != []}
