"""Names of units written short: "layers.0-3" for the attention and the MLP of four layers."""

from collections.abc import Iterator, Sequence

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
