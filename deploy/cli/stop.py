"""``helios stop``."""

import json

import typer

from ..state import DEFAULT_APP, not_running, running_apps
from . import options as o


def stop(app: o.App = None, ray_address: o.RayAddress = None, as_json: o.AsJson = False) -> None:
    """Stop an app, and the Ray that Helios started when no other app is left on it.

    Requests that are being answered have a few seconds to finish; those that do not are told so.

    Examples:

        helios stop
    """
    from ..serving import DRAIN_S
    from ..serving import stop as stop_serving

    name = app or DEFAULT_APP
    stopped = stop_serving(name, ray_address, drain_s=DRAIN_S)
    if not stopped and (app is not None or running_apps()):
        raise not_running(name)
    if as_json:
        typer.echo(json.dumps({"stopped": stopped}))
    elif stopped:
        for item in stopped:
            typer.echo(f"stopped {item}")
    else:
        typer.echo("nothing to stop: no app is running")
