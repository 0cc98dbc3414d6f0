"""Latency against throughput: the best plan under each limit on the time of a block (the paper's Figure 1)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from engine.errors import HeliosError
from engine.planner.search import Task, search

STEPS = 8


@dataclass(frozen=True, slots=True)
class Point:
    """A plan: seconds of a block, tokens a second."""

    latency_s: float
    throughput: float
    block: int


def frontier(task: Task, steps: int = STEPS) -> list[Point]:
    """From the plan with the highest throughput down, each with a latency limit below the last one's latency."""
    points: list[Point] = []
    limit_s: float | None = None
    for _ in range(steps):
        try:
            best = search(replace(task, latency_limit_s=limit_s)).ranked[0]
        except HeliosError:
            break
        points.append(Point(best.simulation.total_s, best.simulation.throughput, best.config.max_sequences))
        limit_s = best.simulation.total_s / 2
    return points


def draw(path: Path, lines: dict[str, Sequence[Point]]) -> None:
    """One line a task, both axes logarithmic."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        axes.plot([p.latency_s for p in points], [p.throughput for p in points], marker="o", label=name)
        for point in points:
            axes.annotate(str(point.block), (point.latency_s, point.throughput), fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="latency of a block, s", ylabel="tokens/s")
    axes.legend()
    figure.savefig(path, dpi=120)
