"""Where weights and KV go under one option: a mixed-integer programme, and from its counts to units by name.

All layers are alike, so what counts is how many attention groups, how many MLP groups and how many sequences' KV each
tier gets. The programme is FlexGen's linear one (section 4.3) in whole units.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import cvxpy as cp
import numpy as np
import numpy.typing as npt

from ..config import TIERS, TierName
from ..units import Unit, units
from .costs import RESOURCES, Costs, Form, Kind, Resource
from .places import spread

MIB = 2**20
SCALE = 1000.0
"""Times are given to the solver in about this size, since its tolerance is absolute."""
LOSS = 0.1
"""Of the time of all resources but the slowest, what is not hidden behind it: a sweep begins and ends with waiting, and
slots run out. It also decides between placements that are equally fast where all is hidden."""
NEVER = 1e9
"""No limit, in the solver's unit of time."""
Array = npt.NDArray[np.float64]
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
    disk: bool
    """Whether there is one, for weights."""
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


Key = tuple[Kind, TierName]
COLUMNS: tuple[Key, ...] = tuple((kind, tier) for kind in KINDS for tier in TIERS)
"""How many units of each kind are on each tier: the first variables of the programme, before the tiers' sequences."""
STREAMED: tuple[Kind, ...] = ("attention", "mlp", "head")
"""Kinds that pass through slots in every sweep unless they are on the device."""


class Placer:
    """Solves programmes, of which those alike in form are compiled once. For one thread at a time."""

    def __init__(self) -> None:
        self._compiled: dict[tuple[object, ...], _Programme] = {}

    def place(
        self, shape: Shape, costs: Costs, room: Room, overlap: bool = True, most_s: float | None = None
    ) -> Counts | None:
        """The fastest placement that fits and takes ``most_s`` at most; None if there is none. Without ``overlap`` a
        sweep takes the sum of its resources' times."""
        key = (tuple(shape.kv_tiers), tuple(shape.staged), shape.tied, shape.disk, overlap)
        if key not in self._compiled:
            self._compiled[key] = _Programme(shape, overlap)
        found = self._compiled[key].solve(shape, costs, room, most_s)
        return _counts(shape, costs, *found, overlap) if found else None


class _Programme:
    """The programme with all numbers as parameters."""

    def __init__(self, form: Shape, overlap: bool) -> None:
        """For shapes with the same tiers and ties as ``form``."""
        kv_tiers, tied = form.kv_tiers, form.tied
        self._kv_tiers = list(kv_tiers)
        self._brought = [tier for tier in form.staged if tier in kv_tiers]
        size, per_phase = len(COLUMNS) + len(kv_tiers), len(RESOURCES) if overlap else 1
        self._overlap = overlap
        self._number = cp.Parameter(len(KINDS), nonneg=True)
        self._block = cp.Parameter(nonneg=True)
        self._prefill, self._decode = (
            (cp.Parameter((per_phase, size)), cp.Parameter(per_phase)) for _ in ("prefill", "decode")
        )
        self._held, self._room = cp.Parameter((len(TIERS), size)), cp.Parameter(len(TIERS))
        self._buffers = cp.Parameter(1 + len(self._brought), nonneg=True)
        self._sweeps, self._most = cp.Parameter(nonneg=True), cp.Parameter(nonneg=True)
        self._all = cp.Parameter(size), cp.Parameter()
        """LOSS of all resources' times together, prefill and decode."""
        self._x = cp.Variable(size, integer=True)
        uses = cp.Variable(1 + len(self._brought), boolean=True)
        times = cp.Variable(2)
        at = {key: self._x[column] for column, key in enumerate(COLUMNS)}
        sequences = {tier: self._x[len(COLUMNS) + i] for i, tier in enumerate(kv_tiers)}
        limits = [self._x >= 0, sum(sequences.values()) == self._block]
        for i, kind in enumerate(KINDS):
            limits.append(sum(at[kind, tier] for tier in TIERS) == self._number[i])
            if kind in STREAMED:
                limits.append(at[kind, "device"] >= self._number[i] - self._number[i] * uses[0])
        if not form.disk:
            limits.append(sum(at[kind, "disk"] for kind in KINDS) == 0)
        if tied:
            limits.append(at["embedding", "device"] == at["head", "device"])
        limits += [sequences[tier] <= self._block * uses[1 + i] for i, tier in enumerate(self._brought)]
        held = self._held @ self._x
        limits += [held[0] + self._buffers @ uses <= self._room[0], held[1:] <= self._room[1:]]
        for i, (rates, fixed) in enumerate((self._prefill, self._decode)):
            limits.append(rates @ self._x + fixed <= times[i])
        total = times[0] + self._sweeps * times[1]
        if overlap:
            total = (1 - LOSS) * total + self._all[0] @ self._x + self._all[1]
        limits.append(total <= self._most)
        self._problem = cp.Problem(cp.Minimize(total), limits)

    def solve(
        self, shape: Shape, costs: Costs, room: Room, most_s: float | None
    ) -> tuple[dict[Key, int], dict[TierName, int]] | None:
        """Units and sequences of each tier, or None if nothing fits."""
        unit_s = _fixed_s(costs) / SCALE
        self._number.value = [shape.n_layers if kind in ("attention", "mlp") else 1 for kind in KINDS]
        self._block.value = shape.block
        slopes, offsets = 0.0, 0.0
        for (rates, fixed), forms, sweeps in (
            (self._prefill, costs.prefill, 1),
            (self._decode, costs.decode, costs.decode_sweeps),
        ):
            rates.value, fixed.value = (times / unit_s for times in self._times(shape, forms))
            slopes, offsets = slopes + sweeps * rates.value.sum(0), offsets + sweeps * fixed.value.sum()
        self._all[0].value, self._all[1].value = LOSS * slopes, LOSS * offsets
        self._held.value = self._bytes(shape) / MIB
        self._room.value = np.array([room.device - room.loading, room.host, room.disk]) / MIB
        self._buffers.value = np.array([room.streaming - room.loading] + [room.kv_slots] * len(self._brought)) / MIB
        self._sweeps.value = costs.decode_sweeps
        self._most.value = NEVER if most_s is None else most_s / unit_s
        self._problem.solve(solver=cp.SCIPY)  # HiGHS by scipy: cvxpy's own way to it prints a banner
        if self._problem.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
            return None
        assert self._x.value is not None, "an optimal problem has values"
        values = [round(float(value)) for value in self._x.value]
        return dict(zip(COLUMNS, values, strict=False)), dict(zip(self._kv_tiers, values[len(COLUMNS) :], strict=True))

    def _times(self, shape: Shape, forms: Mapping[Resource, Form]) -> tuple[Array, Array]:
        """Seconds of each resource, or of all together without overlap: rates [rows, columns], and what is fixed."""
        rates = np.zeros((len(RESOURCES), len(COLUMNS) + len(self._kv_tiers)))
        for row, form in enumerate(forms[resource] for resource in RESOURCES):
            for column, (kind, tier) in enumerate(COLUMNS):
                if tier != "device" and kind != "embedding":
                    rates[row, column] = form.weights.get(tier, 0.0) * _read_bytes(shape, kind)
                elif (kind, tier) == ("embedding", "disk"):
                    rates[row, column] = form.lookups
            for i, tier in enumerate(self._kv_tiers):
                rates[row, len(COLUMNS) + i] = form.kv.get(tier, 0.0)
        fixed = np.array([forms[resource].fixed for resource in RESOURCES])
        if self._overlap:
            return rates, fixed
        return rates.sum(0, keepdims=True), fixed.sum(keepdims=True)

    def _bytes(self, shape: Shape) -> Array:
        """Of each tier, bytes that a unit or sequence there holds. Weights on disk lie in the checkpoint: none."""
        held = np.zeros((len(TIERS), len(COLUMNS) + len(self._kv_tiers)))
        for column, (kind, tier) in enumerate(COLUMNS):
            if tier != "disk":
                held[TIERS.index(tier), column] = _size(shape, kind, tier)
        for i, tier in enumerate(self._kv_tiers):
            held[TIERS.index(tier), len(COLUMNS) + i] = shape.kv_bytes
        return held


def _fixed_s(costs: Costs) -> float:
    """Seconds of the whole block that no placement saves."""
    prefill, decode = (max(form.fixed for form in forms.values()) for forms in (costs.prefill, costs.decode))
    return prefill + costs.decode_sweeps * decode


def _counts(
    shape: Shape, costs: Costs, of: Mapping[Key, int], sequences: Mapping[TierName, int], overlap: bool
) -> Counts:
    """The counts with the seconds they take, free of the solver's tolerance."""
    read: dict[TierName, float] = dict.fromkeys(TIERS, 0.0)
    for (kind, tier), n in of.items():
        if tier != "device" and kind != "embedding":
            read[tier] += float(_read_bytes(shape, kind) * n)
    prefill_s, decode_s = (
        together([form.seconds(read, sequences, of["embedding", "disk"]) for form in forms.values()], overlap)
        for forms in (costs.prefill, costs.decode)
    )
    return Counts(of, sequences, prefill_s, decode_s, prefill_s + costs.decode_sweeps * decode_s)


def together(seconds: Sequence[float], overlap: bool) -> float:
    """What resources that are busy for so long take together."""
    if not overlap:
        return sum(seconds)
    return (1 - LOSS) * max(seconds) + LOSS * sum(seconds)


def _size(shape: Shape, kind: Kind, tier: TierName) -> int:
    """A head that is the embedding takes nothing beside it, but where the table is looked up on the host and the head
    is uploaded from there they are two."""
    apart = kind == "head" and shape.tied and tier == "host"
    return shape.unit_bytes["embedding" if apart else kind]


def _read_bytes(shape: Shape, kind: Kind) -> int:
    """Bytes that a sweep reads of such a unit; of the embedding it takes single rows, which are next to nothing."""
    return shape.unit_bytes["embedding" if kind == "head" and shape.tied else kind]


def named_units(n_layers: int, counts: Counts) -> dict[TierName, list[str]]:
    """The units of each tier, by name. Those of one kind are spread evenly over the layers, so that what is read in a
    sweep comes at even distances and the link is never idle."""
    tiers: dict[TierName, list[str]] = {}
    for kind in KINDS:
        shares = {tier: counts.of.get((kind, tier), 0) for tier in TIERS}
        chosen = spread(shares)
        for number, tier in enumerate(chosen):
            tiers.setdefault(tier, []).append(str(Unit(kind, number)))
    order = {str(unit): at for at, unit in enumerate(units(n_layers))}
    return {tier: sorted(names, key=order.__getitem__) for tier, names in tiers.items()}
