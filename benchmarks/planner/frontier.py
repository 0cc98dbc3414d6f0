"""Latency against throughput: the best plan under each limit on the time of a block (the paper's Figure 1)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from engine.config import EngineConfig
from engine.errors import HeliosError
from engine.planner.search import search
from engine.planner.task import Task

STEPS = 8


@dataclass(frozen=True, slots=True)
class Point:
    """A plan: seconds of a block, tokens a second."""

    latency_s: float
    throughput: float
    block: int
    config: EngineConfig
    measured: float | None = None
    """Tokens a second of a real run."""

    def figures(self) -> dict[str, float | int | None]:
        """For the JSON."""
        return {
            "latency_s": self.latency_s,
            "throughput": self.throughput,
            "block": self.block,
            "measured": self.measured,
        }


def frontier(task: Task, steps: int = STEPS) -> list[Point]:
    """From the plan with the highest throughput down, each with a latency limit below the last one's latency."""
    points: list[Point] = []
    limit_s: float | None = None
    for _ in range(steps):
        try:
            best = search(replace(task, latency_limit_s=limit_s)).ranked[0]
        except HeliosError:
            break
        points.append(
            Point(best.simulation.total_s, best.simulation.throughput, best.config.max_sequences, best.config)
        )
        limit_s = best.simulation.total_s / 1.5
    return points


def draw(path: Path, lines: Mapping[str, Sequence[Point]]) -> None:
    """One line a task, both axes logarithmic."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        axes.plot([p.latency_s for p in points], [p.throughput for p in points], marker="o", label=name)
        real = [(p.latency_s * p.throughput / p.measured, p.measured) for p in points if p.measured]
        if real:  # a block's latency is its tokens by its speed
            axes.plot(*zip(*real, strict=True), marker="x", linestyle="none", label=f"{name}, measured")
        for point in points:
            axes.annotate(str(point.block), (point.latency_s, point.throughput), fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="latency of a block, s", ylabel="tokens/s")
    axes.legend()
    figure.savefig(path, dpi=120)
