"""Where weights and KV go under one option: a mixed-integer programme, and from its counts to units by name.

All layers are alike, so what counts is how many attention groups, how many MLP groups and how many sequences' KV each
tier gets. The programme is FlexGen's linear one (section 4.3) in whole units.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cvxpy as cp

from ..config import TIERS, TierName
from ..units import Unit, units
from .costs import RESOURCES, Costs, Form, Kind

MIB = 2**20
SCALE = 1000.0
"""Times are given to the solver in about this size, since its tolerance is absolute."""
KINDS: tuple[Kind, ...] = ("embedding", "attention", "mlp", "head")


@dataclass(frozen=True, slots=True)
class Room:
    """What the tiers have for weights, KV and the buffers these pass through, all else being taken off. Bytes."""

    device: int
    host: int
    disk: int
    loading: int
    """Device memory that weights pass through when they are loaded once."""
    streaming: int
    """Likewise when some of them pass in every sweep."""
    kv_slots: int
    """Likewise for KV that is brought to the device from one other tier."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is to be placed."""

    n_layers: int
    unit_bytes: Mapping[Kind, int]
    tied: bool
    """The head is the embedding: both on the device, or both elsewhere."""
    block: int
    """Sequences."""
    kv_bytes: float
    """Of one sequence, all layers."""
    kv_tiers: Sequence[TierName]
    staged: Sequence[TierName]
    """Tiers from which KV is brought to the device; to KV on the others attention goes itself."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How much of each kind each tier gets."""

    of: Mapping[tuple[Kind, TierName], int]
    sequences: Mapping[TierName, int]
    prefill_s: float
    decode_s: float
    """Of one sweep."""
    total_s: float


def place(shape: Shape, costs: Costs, room: Room, overlap: bool = True, most_s: float | None = None) -> Counts | None:
    """The fastest placement that fits and takes ``most_s`` at most; None if there is none. Without ``overlap`` a sweep
    takes the sum of its resources' times."""
    count = {(kind, tier): cp.Variable(integer=True) for kind in KINDS for tier in TIERS}
    sequences = {tier: cp.Variable(integer=True) for tier in shape.kv_tiers}
    streams = cp.Variable(boolean=True)
    brings = {tier: cp.Variable(boolean=True) for tier in shape.staged if tier in sequences}
    limits = [variable >= 0 for variable in (*count.values(), *sequences.values())]
    for kind in KINDS:
        number = shape.n_layers if kind in ("attention", "mlp") else 1
        limits.append(sum(count[kind, tier] for tier in TIERS) == number)
        if kind != "embedding":
            limits.append(count[kind, "device"] >= number * (1 - streams))
    if shape.tied:
        limits.append(count["embedding", "device"] == count["head", "device"])
    limits.append(sum(sequences.values()) == shape.block)
    limits += [sequences[tier] <= shape.block * brought for tier, brought in brings.items()]
    held = {tier: _held(shape, count, sequences, tier) for tier in TIERS}
    buffers = room.loading + (room.streaming - room.loading) * streams + room.kv_slots * sum(brings.values())
    limits.append((held["device"] + buffers) / MIB <= room.device / MIB)
    limits += [held["host"] / MIB <= room.host / MIB, held["disk"] / MIB <= room.disk / MIB]
    read = _read(shape, count)
    unit_s = _fixed_s(costs) / SCALE
    prefill, decode = cp.Variable(), cp.Variable()
    for times, forms in ((prefill, costs.prefill), (decode, costs.decode)):
        looked_up = count["embedding", "disk"]
        terms = [_expression(forms[resource], read, sequences, looked_up) / unit_s for resource in RESOURCES]
        limits += [times >= term for term in terms] if overlap else [times >= sum(terms)]
    total = prefill + costs.decode_sweeps * decode
    if most_s is not None:
        limits.append(total <= most_s / unit_s)
    problem = cp.Problem(cp.Minimize(total), limits)
    problem.solve(solver=cp.SCIPY)  # HiGHS by scipy, since cvxpy's own way to it prints a banner to standard output
    if problem.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
        return None
    of = {key: _whole(variable) for key, variable in count.items()}
    placed = {tier: _whole(variable) for tier, variable in sequences.items()}
    return _counts(shape, costs, of, placed, overlap)


def _whole(variable: cp.Variable) -> int:
    """The value that the solver gave it."""
    assert variable.value is not None, "an optimal problem has values"
    return round(float(variable.value))


def _fixed_s(costs: Costs) -> float:
    """Seconds of the whole block that no placement saves."""
    prefill, decode = (max(form.fixed for form in forms.values()) for forms in (costs.prefill, costs.decode))
    return prefill + costs.decode_sweeps * decode


def _counts(
    shape: Shape,
    costs: Costs,
    of: Mapping[tuple[Kind, TierName], int],
    sequences: Mapping[TierName, int],
    overlap: bool,
) -> Counts:
    """The counts with the seconds they take, free of the solver's tolerance."""
    read = {tier: float(size) for tier, size in _read(shape, of).items()}
    together = max if overlap else sum
    prefill_s, decode_s = (
        float(together(form.seconds(read, sequences, of["embedding", "disk"]) for form in forms.values()))
        for forms in (costs.prefill, costs.decode)
    )
    return Counts(of, sequences, prefill_s, decode_s, prefill_s + costs.decode_sweeps * decode_s)


def _held(
    shape: Shape,
    count: Mapping[tuple[Kind, TierName], cp.Variable],
    sequences: Mapping[TierName, cp.Variable],
    tier: TierName,
) -> cp.Expression:
    """Bytes on a tier. Weights on disk lie in the checkpoint and take none."""
    held: cp.Expression = cp.Constant(0)
    if tier in sequences:
        held += shape.kv_bytes * sequences[tier]
    if tier != "disk":
        held += sum(_size(shape, kind, tier) * count[kind, tier] for kind in KINDS)
    return held


def _size(shape: Shape, kind: Kind, tier: TierName) -> int:
    """A head that is the embedding takes nothing beside it, but where the table is looked up on the host and the head
    is uploaded from there they are two."""
    apart = kind == "head" and shape.tied and tier == "host"
    return shape.unit_bytes["embedding" if apart else kind]


def _read(shape: Shape, count: Mapping[tuple[Kind, TierName], Any]) -> dict[TierName, Any]:
    """Bytes that a sweep reads from each tier: of the embedding it takes single rows, which are next to nothing."""
    head = shape.unit_bytes["embedding" if shape.tied else "head"]
    bytes_of = {**shape.unit_bytes, "head": head}
    read: dict[TierName, Any] = dict.fromkeys(TIERS, 0)
    for (kind, tier), n in count.items():
        if tier != "device" and kind != "embedding":
            read[tier] += bytes_of[kind] * n
    return read


def _expression(
    form: Form,
    read: Mapping[TierName, cp.Expression],
    sequences: Mapping[TierName, cp.Variable],
    looked_up: cp.Variable,
) -> Any:
    parts = [rate * read[tier] for tier, rate in form.weights.items()]
    parts += [rate * sequences[tier] for tier, rate in form.kv.items() if tier in sequences]
    return cp.Constant(form.fixed) + form.lookups * looked_up + sum(parts)


def named_units(n_layers: int, counts: Counts) -> dict[TierName, list[str]]:
    """The units of each tier, by name. Those of one kind are spread evenly over the layers, so that what is read in a
    sweep comes at even distances and the link is never idle."""
    tiers: dict[TierName, list[str]] = {}
    for kind in KINDS:
        shares = {tier: counts.of.get((kind, tier), 0) for tier in TIERS}
        chosen = _spread(shares)
        for number, tier in enumerate(chosen):
            tiers.setdefault(tier, []).append(str(Unit(kind, number)))
    order = {str(unit): at for at, unit in enumerate(units(n_layers))}
    return {tier: sorted(names, key=order.__getitem__) for tier, names in tiers.items()}


def _spread(shares: Mapping[TierName, int]) -> list[TierName]:
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
