"""``helios version``."""

import json
import platform
from importlib.metadata import version as installed

import typer

from . import options as o

_PACKAGES = ("helios-llm", "ray", "torch", "transformers")


def version(as_json: o.AsJson = False) -> None:
    """Print the versions of Helios and of what it runs on."""
    versions = {name: installed(name) for name in _PACKAGES} | {"python": platform.python_version()}
    if as_json:
        typer.echo(json.dumps(versions))
    else:
        for name, number in versions.items():
            typer.echo(f"{name} {number}")
