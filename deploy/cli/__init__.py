"""The ``helios`` command."""

import sys


def main() -> None:
    """Entry point of the ``helios`` script."""
    from .group import heed_signals, status_of

    heed_signals()
    try:
        from .app import app

        app()
    except KeyboardInterrupt as interrupt:  # before a command has begun
        sys.exit(status_of(interrupt))
