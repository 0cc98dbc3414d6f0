"""The ``helios`` command."""

import os
import sys

from .group import flush, heed_signals, status_of


def main() -> None:
    """Entry point of the ``helios`` script."""
    try:
        heed_signals()
        from .app import app

        app()
    except KeyboardInterrupt as interrupt:  # before a command has begun
        sys.exit(status_of(interrupt))
    except SystemExit as end:
        flush()
        if isinstance(end.code, int) and end.code > 128 and "ray" in sys.modules:
            # What Ray was doing when it was interrupted may crash at the interpreter's end; nothing is left to do.
            os._exit(end.code)
        raise
