"""How the command line fails: one sentence on stderr and a status, no traceback."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup

from engine.errors import HeliosError

TRACEBACK = "HELIOS_TRACEBACK"
"""Set to 1, errors are raised as they are."""


RETRY_S = 0.01


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: whatever an interrupt has to undo or to say, these have too."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


def heed_signals() -> None:
    """Have SIGTERM and SIGHUP end a command as an interrupt does, save where one is ignored, as under nohup."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    if _imports(frame):  # some packages swallow an interrupt of their import, and none can be imported a second time
        again = threading.Timer(RETRY_S, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
    elif number == signal.SIGINT:
        raise KeyboardInterrupt
    else:
        raise Terminated(number)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def status_of(interrupt: KeyboardInterrupt) -> int:
    """As a shell gives it: 128 and the signal's number."""
    return interrupt.status if isinstance(interrupt, Terminated) else 128 + signal.SIGINT


class HeliosGroup(TyperGroup):
    """A command group that says a HeliosError and exits with 1. Wrong usage exits with 2, an interrupt with 130.

    SIGTERM exits with 143, SIGHUP with 129, an output that nobody reads any more with 141.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except HeliosError as error:
            if os.environ.get(TRACEBACK) == "1":
                raise
            fail(str(error))
        except KeyboardInterrupt as interrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(status_of(interrupt)) from None
        except BrokenPipeError:  # whoever read the output has seen enough
            flush()
            raise typer.Exit(128 + signal.SIGPIPE) from None
        except Exception as error:
            # Exit and usage errors are the framework's own way out; any other is a fault of ours.
            if os.environ.get(TRACEBACK) == "1" or type(error).__module__.startswith(("typer.", "click.")):
                raise
            fail(f"internal fault, {type(error).__name__}: {error}; set {TRACEBACK}=1 to see where")
        else:
            return result


def flush() -> None:
    """Write out what is left, or throw it away if nobody reads it: at its end Python would complain about that."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def fail(message: str) -> None:
    """Say what is wrong and leave with status 1."""
    sys.stdout.flush()
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1) from None
