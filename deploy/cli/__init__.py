"""The ``helios`` command."""

import os


def main() -> None:
    """Entry point of the ``helios`` script."""
    # The Ray that Helios starts asks for a token (see actors.runtime). Ray reads this once, when it is imported, so it
    # is said here, before any command can import it. A cluster without tokens needs RAY_AUTH_MODE=disabled.
    os.environ.setdefault("RAY_AUTH_MODE", "token")

    from .app import app

    app()
