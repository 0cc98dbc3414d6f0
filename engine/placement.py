"""Which unit of the weights lives on which tier: as the user names them, or as many on the device as fit."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from .config import TierName
from .errors import ConfigError
from .sizes import Sizes
from .spec import ModelSpec
from .units import Unit, units

Placement = Mapping[Unit, TierName]
"""The tier of every unit of ``units.units``. A tied head is on the device if and only if the embedding is."""
NAME = re.compile(r"layers\.(\d+)(?:-(\d+))?(?:\.(attention|mlp))?")
"""Units of layers as they are written: first layer, last layer, part."""


def named(spec: ModelSpec, given: Mapping[TierName, Sequence[str]]) -> dict[Unit, TierName]:
    """The placement that gives each tier its units: "embedding", "head", "layers.3", "layers.0-11.mlp" and so on.

    Raises ConfigError for a name that is none, and for a unit that is named twice or not at all.
    """
    placement: dict[Unit, TierName] = {}
    for tier, names in given.items():
        for unit in (unit for name in names for unit in _parse(spec, name)):
            if unit in placement:
                raise ConfigError(f"weights: '{unit}' is placed on '{placement[unit]}' and on '{tier}'; name it once")
            placement[unit] = tier
    missing = [str(unit) for unit in units(spec.n_layers) if unit not in placement]
    if missing:
        raise ConfigError(f"weights: {', '.join(missing[:3])} ({len(missing)} units) are placed nowhere; name a tier")
    if spec.tied and (placement[Unit("embedding")] == "device") != (placement[Unit("head")] == "device"):
        raise ConfigError("weights: this model's head is its embedding; place both on the device, or both elsewhere")
    return placement


def _parse(spec: ModelSpec, name: str) -> Iterable[Unit]:
    if name == "embedding":
        return [Unit("embedding")]
    if name == "head":
        return [Unit("head")]
    match = NAME.fullmatch(name)
    if not match:
        raise ConfigError(f"weights: '{name}' is no unit; write embedding, head, layers.3, layers.0-11 or layers.3.mlp")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last or last >= spec.n_layers:
        raise ConfigError(f"weights: '{name}' is outside the model's layers 0 to {spec.n_layers - 1}")
    found = [unit for unit in units(spec.n_layers) if unit.kind in ("attention", "mlp")]
    return [u for u in found if first <= u.number <= last and match[3] in (None, u.kind)]


def grouped(placement: Placement) -> dict[TierName, list[str]]:
    """The placement as ``named`` reads it, in the order of a sweep."""
    tiers: dict[TierName, list[str]] = {}
    for unit, tier in placement.items():
        tiers.setdefault(tier, []).append(str(unit))
    return tiers


def fill(sizes: Sizes, room_bytes: int) -> dict[Unit, TierName]:
    """Units on the device up to ``room_bytes``, the others on disk.

    Those on disk are spread evenly over the sweep, so that the disk is never idle while the device computes on a long
    run of resident layers and the slots are full.
    """
    spec, of = sizes.spec, {unit: sizes.matrices(unit) for unit in units(sizes.spec.n_layers)}
    if sum(of.values()) <= room_bytes:
        return dict.fromkeys(of, "device")
    placement: dict[Unit, TierName] = dict.fromkeys(of, "disk")
    if not spec.tied and of[Unit("embedding")] > 0:  # a token needs one row of it, which is quickly read
        visited = [unit for unit in of if unit.kind != "embedding"]
    else:
        visited = [unit for unit in of if unit.kind != "head"]
    share = _largest_share(lambda s: sum(of[unit] for unit in _spread(visited, of, s)), room_bytes)
    for unit in _spread(visited, of, share):
        placement[unit] = "device"
    left = room_bytes - sum(of[unit] for unit, tier in placement.items() if tier == "device")
    for unit in sorted(visited, key=lambda unit: -of[unit]):  # what is left may hold one more
        if placement[unit] == "disk" and of[unit] <= left:
            placement[unit], left = "device", left - of[unit]
    if spec.tied:
        placement[Unit("head")] = placement[Unit("embedding")]
    return placement


def _spread(visited: Sequence[Unit], sizes: Mapping[Unit, int], share: float) -> list[Unit]:
    """About ``share`` of the bytes, evenly over the order of visits."""
    chosen, seen, taken = [], 0, 0
    for unit in visited:
        seen += sizes[unit]
        if taken + sizes[unit] <= share * seen:
            chosen.append(unit)
            taken += sizes[unit]
    return chosen


def _largest_share(bytes_at: Callable[[float], int], room_bytes: int) -> float:
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if bytes_at(middle) <= room_bytes else (low, middle)
    return low
