"""``helios stop``."""

import json

import typer

from ..state import DEFAULT_APP
from . import options as o


def stop(app: o.AppOrDefault = DEFAULT_APP, ray_address: o.RayAddress = None, as_json: o.AsJson = False) -> None:
    """Stop an app, and the Ray that Helios started when no other app is left on it.

    Examples:

        helios stop
    """
    from ..serving import DRAIN_S
    from ..serving import stop as stop_serving

    stopped = stop_serving(app, ray_address, drain_s=DRAIN_S)
    if as_json:
        typer.echo(json.dumps({"stopped": stopped}))
    elif stopped:
        for item in stopped:
            typer.echo(f"stopped {item}")
    else:
        typer.echo(f"nothing to stop: no app '{app}' is running")
