"""The ``helios`` command."""


def main() -> None:
    """Entry point of the ``helios`` script."""
    from .app import app

    app()
