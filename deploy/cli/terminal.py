"""Tables on the terminal."""

from typing import NoReturn

from rich.console import Console


class Terminal(Console):
    """A console that leaves a broken pipe to ``HeliosGroup``, as every other output does."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError
