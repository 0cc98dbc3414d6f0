"""How the command line fails: one sentence on stderr and a status, no traceback."""

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from engine.errors import HeliosError

TRACEBACK = "HELIOS_TRACEBACK"
"""Set to 1, errors are raised as they are."""


class HeliosGroup(TyperGroup):
    """A command group that says a HeliosError and exits with 1. Wrong usage exits with 2, an interrupt with 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HeliosError as error:
            if os.environ.get(TRACEBACK) == "1":
                raise
            fail(str(error))
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None
        except Exception as error:
            # Exit and usage errors are the framework's own way out; any other is a fault of ours.
            if os.environ.get(TRACEBACK) == "1" or type(error).__module__.startswith(("typer.", "click.")):
                raise
            fail(f"internal fault, {type(error).__name__}: {error}; set {TRACEBACK}=1 to see where")


def fail(message: str) -> None:
    """Say what is wrong and leave with status 1."""
    sys.stdout.flush()
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1) from None
