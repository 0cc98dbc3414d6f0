"""The paper's policy search (section 4.3): for each of many block shapes, the nine fractions are a linear programme.

    minimise    T / bls,   T = Tpre * l + Tgen * (n - 1) * l
    subject to  every term of prefill <= Tpre, every term of decode <= Tgen,
                every peak of a tier <= its capacity,
                each triple of fractions sums to 1, none is negative.

The terms and peaks are those of ``cost``, evaluated where all fractions are 0 and where one of them is 1: as they are
linear, that gives their offsets and slopes. cvxpy compiles the programme once, with these as parameters, and HiGHS
solves it anew for every block shape.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np
import numpy.typing as npt

from ...config import TIERS
from ...errors import ConfigError, HeliosError, OutOfMemoryError
from .cost import PHASES, Block, Cost, evaluate, memory, terms
from .model import GB, PAPER, Fractions, Job, Options, PaperHardware, PaperModel, Policy, check_count

MAX_GBS = 256
"""The largest GPU batch that is tried; of the paper's own policies the largest is 72."""
MAX_BATCHES = 20
"""The most GPU batches of a block, as the paper has it."""
N_FRACTIONS = 9

Array = npt.NDArray[np.float64]
Progress = Callable[[int, int, "Solution | None"], None]
"""Called with the block shapes that are done, how many there are, and the best solution so far."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The best policy of one block shape, and its cost by the formulas (not by the solver's own arithmetic)."""

    policy: Policy
    cost: Cost

    @property
    def throughput(self) -> float:
        """Generated tokens a second."""
        return self.cost.throughput


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came upon: the best policy of every block shape that fits, the fastest first, and of equally fast
    ones the smallest block."""

    solutions: tuple[Solution, ...]

    @property
    def best(self) -> Solution:
        return self.solutions[0]

    @property
    def runners_up(self) -> tuple[Solution, ...]:
        return self.solutions[1:]


def solve(
    model: PaperModel, hardware: PaperHardware, job: Job, gbs: int, n_batches: int, options: Options = PAPER
) -> Solution | None:
    """The best policy of one block shape; None if nothing of that shape fits.

    Raises ConfigError for a shape that makes no sense, HeliosError if the solver finds neither.
    """
    return Programme(model, hardware, job, options).solve(gbs, n_batches)


def batch_sizes(most: int = MAX_GBS) -> list[int]:
    """The GPU batch sizes that a search tries: multiples of 4, as in the paper, and 1 and 2, which it also uses."""
    check_count("most", most, "the sequences of the largest GPU batch")
    return [size for size in (1, 2, *range(4, most + 1, 4)) if size <= most]


def search(
    model: PaperModel,
    hardware: PaperHardware,
    job: Job,
    options: Options = PAPER,
    *,
    gbs: Iterable[int] | None = None,
    max_batches: int = MAX_BATCHES,
    progress: Progress | None = None,
) -> Found:
    """The best policy for each of the GPU batch sizes ``gbs`` (``batch_sizes()`` unless given) in blocks of 1 to
    ``max_batches`` batches.

    What does not fit is not tried in a larger shape: whatever the fractions are, no tier needs less for more sequences.
    Raises ConfigError for sizes that make no sense, OutOfMemoryError if nothing fits, HeliosError as ``solve`` does.
    """
    sizes = list(batch_sizes() if gbs is None else gbs)
    for size in sizes:
        check_count("gbs", size, "the sequences of a GPU batch")
    sizes = sorted(set(sizes))
    if not sizes:
        raise ConfigError("gbs has no batch size; it must have at least 1: give the sizes to try, or leave it out")
    check_count("max_batches", max_batches, "the most GPU batches of a block")
    programme = Programme(model, hardware, job, options)
    solutions: list[Solution] = []
    best: Solution | None = None
    most = max_batches
    for index, size in enumerate(sizes):
        for n_batches in range(1, most + 1):
            solution = programme.solve(size, n_batches)
            if solution is None:
                most = n_batches - 1
                break
            solutions.append(solution)
            if best is None or solution.throughput > best.throughput:
                best = solution
            if progress:
                progress(index * max_batches + n_batches, len(sizes) * max_batches, best)
        if most == 0:
            break
    if progress:
        progress(len(sizes) * max_batches, len(sizes) * max_batches, best)
    if not solutions:
        room = ", ".join(f"{hardware.capacity(tier) / GB:.1f} GiB of {tier}" for tier in TIERS)
        raise OutOfMemoryError(
            f"{model.name} with prompts of {job.s} tokens and {job.n} more has no policy that fits {room}, even in "
            f"blocks of {sizes[0]}; give more memory or a shorter job, or compress weights and KV"
        )
    return Found(tuple(sorted(solutions, key=_rank)))


def _rank(solution: Solution) -> tuple[float, int]:
    """Throughputs that differ by rounding alone are equal."""
    return -float(f"{solution.throughput:.9g}"), solution.policy.block_size


class Programme:
    """The linear programme of one model, machine and job, compiled once for all block shapes.

    Its rows are the terms of both phases and the peaks of every tier in both. To be well scaled it has its own units:
    layer times in what the device computes whatever the policy, memory in the tier's capacity.
    """

    def __init__(self, model: PaperModel, hardware: PaperHardware, job: Job, options: Options = PAPER) -> None:
        self.model, self.hardware, self.job, self.options = model, hardware, job, options
        layer_of = self._rows(self._block(1, 1)).layer_of
        self._slopes = cp.Parameter((len(layer_of), N_FRACTIONS))
        self._offsets = cp.Parameter(len(layer_of))
        self._weights = cp.Parameter(len(PHASES), nonneg=True)
        self._fractions = cp.Variable(N_FRACTIONS, nonneg=True)
        layer = cp.Variable(len(PHASES))
        triples = np.kron(np.eye(3), np.ones(3))
        self._problem = cp.Problem(
            cp.Minimize(self._weights @ layer),
            [self._slopes @ self._fractions + self._offsets <= layer_of @ layer, triples @ self._fractions == 1],
        )

    def solve(self, gbs: int, n_batches: int) -> Solution | None:
        """As the function of that name."""
        rows = self._rows(self._block(gbs, n_batches))
        self._slopes.value, self._offsets.value, self._weights.value = rows.slopes, rows.offsets, rows.weights
        # HiGHS's simplex, by way of scipy: highspy 1.16 prints its own name on stdout.
        try:
            self._problem.solve(solver=cp.SCIPY, scipy_options={"method": "highs-ds"})
        except cp.SolverError as error:
            raise HeliosError(
                f"the solver gives up on {n_batches} batches of {gbs} ({error}); the machine's constants may be too "
                "far apart for it. Check them"
            ) from None
        if self._problem.status == cp.INFEASIBLE:
            return None
        assert self._problem.status == cp.OPTIMAL, self._problem.status
        policy = Policy(gbs, n_batches, _proper(self._fractions.value))
        return Solution(policy, evaluate(self.model, self.hardware, self.job, policy, self.options))

    def _block(self, gbs: int, n_batches: int) -> Block:
        return Block(self.model, self.hardware, self.job, gbs, n_batches, self.options)

    def _rows(self, block: Block) -> "_Rows":
        slopes, offsets, layer_of, units = [], [], [], []
        for phase, repeats, column in zip(PHASES, (1, self.job.n - 1), np.eye(len(PHASES)), strict=True):
            of = terms(block, _CORNERS, phase)
            unit = float(np.broadcast_to(of.gpu_comp, N_FRACTIONS + 1)[0])
            units.append(unit * repeats)
            for time in of.layer_times(block.options.overlap):
                slope, offset = _line(time)
                slopes.append(slope / unit)
                offsets.append(offset / unit)
                layer_of.append(column)
            for tier, held in memory(block, _CORNERS, phase).items():
                capacity = self.hardware.capacity(tier)
                for peak in held.peaks():
                    slope, offset = _line(peak)
                    slopes.append(slope / (capacity or GB))
                    offsets.append((offset - capacity) / (capacity or GB))
                    layer_of.append(np.zeros(len(PHASES)))
        weights = np.array(units) / sum(units)
        return _Rows(np.array(slopes), np.array(offsets), np.array(layer_of), weights)


@dataclass(frozen=True, slots=True)
class _Rows:
    """``slopes @ fractions + offsets <= layer_of @ (Tpre, Tgen)``, and the objective ``weights @ (Tpre, Tgen)``."""

    slopes: Array  # [rows, 9]
    offsets: Array  # [rows]
    layer_of: Array  # [rows, 2], 1 where a row bounds that phase's layer time
    weights: Array  # [2]


_CORNERS: Fractions[Any] = Fractions(*np.vstack([np.zeros(N_FRACTIONS), np.eye(N_FRACTIONS)]).T)
"""Where all fractions are 0, and then where each is the only one that is 1: ten points, along every array."""


def _line(values: Any) -> tuple[Array, float]:
    """Slopes and offset of a linear function by its values at ``_CORNERS``; a constant may be one number."""
    values = np.broadcast_to(np.asarray(values, dtype=np.float64), N_FRACTIONS + 1)
    return values[1:] - values[0], float(values[0])


def _proper(values: Array) -> Fractions[float]:
    """The solver's fractions without what its tolerances leave: none below 0, each triple summing to 1."""
    triples = np.clip(values, 0.0, 1.0).reshape(3, 3)
    return Fractions(*(triples / triples.sum(axis=1, keepdims=True)).ravel().tolist())
