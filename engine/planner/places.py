"""Units by number and by name: whole parts of a total, spread evenly, and written short."""

from collections.abc import Iterator, Mapping, Sequence

from ..config import TierName
from ..placement import NAME


def compact(names: Sequence[str]) -> list[str]:
    """The same units in as few names as ``placement.named`` reads."""
    kept = [name for name in names if not name.startswith("layers.")]
    parts: dict[str, set[int]] = {"attention": set(), "mlp": set()}
    for name in names:
        if name.startswith("layers."):
            _, number, kind = name.split(".")
            parts[kind].add(int(number))
    whole = parts["attention"] & parts["mlp"]
    written = [*_ranges(sorted(whole), "")]
    for kind, numbers in parts.items():
        written += _ranges(sorted(numbers - whole), f".{kind}")
    return [*(name for name in kept if name == "embedding"), *written, *(name for name in kept if name == "head")]


def count_units(names: Sequence[str]) -> int:
    """How many units such names stand for."""
    total = 0
    for name in names:
        layers = NAME.fullmatch(name)
        total += (int(layers[2] or layers[1]) - int(layers[1]) + 1) * (1 if layers[3] else 2) if layers else 1
    return total


def _ranges(numbers: Sequence[int], suffix: str) -> Iterator[str]:
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            first, last = numbers[start], numbers[at - 1]
            yield f"layers.{first}{'' if first == last else f'-{last}'}{suffix}"
            start = at


def in_parts(shares: Mapping[TierName, float], total: int) -> dict[TierName, int]:
    """``total`` in whole parts nearest to shares that sum to 1."""
    parts = {tier: int(share * total) for tier, share in shares.items()}
    rest = sorted(shares, key=lambda tier: shares[tier] * total - parts[tier], reverse=True)
    for tier in rest[: total - sum(parts.values())]:
        parts[tier] += 1
    return parts


def spread(shares: Mapping[TierName, int]) -> list[TierName]:
    """So many of each, each as far behind its share of the row as may be."""
    total = sum(shares.values())
    given: dict[TierName, int] = dict.fromkeys(shares, 0)
    row: list[TierName] = []
    for at in range(1, total + 1):
        left = [tier for tier in shares if given[tier] < shares[tier]]
        tier = max(left, key=lambda tier: (shares[tier] * at / total - given[tier], shares[tier]))
        given[tier] += 1
        row.append(tier)
    return row
