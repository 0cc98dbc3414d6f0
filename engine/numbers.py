"""What counts as a number in configurations, requests and files."""

import math


def is_number(value: object) -> bool:
    """Whether ``value`` is a finite number; a truth value is none, nor is an integer that no float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
