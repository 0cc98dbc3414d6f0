"""How the parts of a pull tell what they are doing, and that a source cannot be reached."""

from collections.abc import Callable

from engine.errors import HeliosError

Report = Callable[[str, int, int], None]
"""Called with a step's name, the units done and the units in all; 0 in all is a notice without a measure."""


class Unreachable(HeliosError):  # noqa: N818 - a state of a source that another source may make good
    """A source cannot be reached just now; another one may do."""


def silent(_step: str, _done: int, _total: int) -> None:
    """A report to nobody."""
