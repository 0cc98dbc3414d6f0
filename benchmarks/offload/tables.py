"""The tables and the picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.table import Table

from benchmarks.offload.contest import Results
from benchmarks.offload.harness import Outcome

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

WIDTH = 150
COLUMNS = [
    "",
    "tokens/s",
    "decode",
    "floor",
    "of the floor",
    "decides",
    "disk GB/s",
    "GFLOP/s",
    "load s",
    "own MB",
    "peak MB",
]


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table as wide as it must be, also where the output is a file."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    Console(width=max(console.width, WIDTH)).print(table)


def end_of(outcome: Outcome) -> str:
    """Tokens a second, or how the run ended instead."""
    if outcome.end == "done":
        return f"{outcome.rate:.2f}"
    if outcome.end == "time limit":
        return f"> {outcome.total_s:.0f} s ({outcome.rate:.2f})"
    return outcome.end


def row(name: str, outcome: Outcome) -> list[str]:
    floor, rates = outcome.floor, outcome.rates
    cells = [name, end_of(outcome), f"{outcome.decode_rate:.2f}" if outcome.decode_rate else ""]
    if floor and rates:
        best = outcome.batch * outcome.n_tokens / floor.total_s
        share = f"{outcome.share:.0%}" if outcome.tokens else ""
        cells += [f"{best:.2f}", share, floor.limit, f"{rates.disk_bytes_s / 1e9:.2f}"]
        cells += [f"{rates.decode_flops_s / 1e9:.0f}"]
    else:
        cells += [""] * 5
    return [*cells, f"{outcome.load_s:.1f}", f"{outcome.own_bytes / 1e6:.0f}", f"{outcome.peak_bytes / 1e6:.0f}"]


def contest_table(results: Results) -> None:
    if results.setting is None:
        print(f"left out: {results.skipped}")
        return
    rows = []
    for outcome in results.outcomes:
        parts = f", {outcome.at_once} at once" if outcome.at_once < outcome.batch else ""
        rows.append(row(f"batch {outcome.batch}, {outcome.n_tokens} new: {outcome.contestant}{parts}", outcome))
    show(results.setting.title, COLUMNS, rows)
    for outcome in results.outcomes:
        if outcome.end == "failed":
            print(f"{outcome.contestant}, batch {outcome.batch}, {outcome.n_tokens} new: {outcome.reason}")


def ablation_table(variants: Mapping[str, Outcome]) -> None:
    everything = next(iter(variants.values()), None)
    rows = [
        [*row(name, outcome), f"{outcome.rate / everything.rate:.2f}" if everything and everything.rate else ""]
        for name, outcome in variants.items()
    ]
    show("What each idea is worth", [*COLUMNS, "of all on"], rows)
    for name, outcome in variants.items():
        if outcome.end == "failed":
            print(f"{name}: {outcome.reason}")


def draw(path: Path, contest: Results, real: Results, variants: Mapping[str, Outcome]) -> None:
    """Contests to the left, the ablation to the right; the floor is a line over each group of bars."""
    figure, axes = plt.subplots(1, 3, figsize=(16, 4.6), width_ratios=(3, 2, 2.4))
    for axis, results in zip(axes[:2], (contest, real), strict=True):
        _contest_bars(axis, results)
    names = list(variants)
    axes[2].barh(names, [outcome.rate for outcome in variants.values()], color="tab:blue")
    for at, outcome in enumerate(variants.values()):
        axes[2].text(outcome.rate, at, f" {end_of(outcome)}", va="center", fontsize=8)
    axes[2].invert_yaxis()
    axes[2].set(title="What each idea is worth", xlabel="tokens/s")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _contest_bars(axis: Axes, results: Results) -> None:
    if results.setting is None or not results.outcomes:
        axis.set_axis_off()
        return
    n_tokens = max(outcome.n_tokens for outcome in results.outcomes)
    shown = [outcome for outcome in results.outcomes if outcome.n_tokens == n_tokens]
    batches = sorted({outcome.batch for outcome in shown})
    names = list(dict.fromkeys(outcome.contestant for outcome in shown))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        found = [results.of(name, batch, n_tokens) for batch in batches]
        at = [x - 0.4 + (i + 0.5) * width for x in range(len(batches))]
        axis.bar(at, [outcome.rate if outcome else 0 for outcome in found], width, label=name)
        for x, outcome in zip(at, found, strict=True):
            if outcome and outcome.end != "done":
                axis.text(x, outcome.rate, f" {end_of(outcome)}", rotation=90, fontsize=7, ha="center", va="bottom")
    for x, batch in enumerate(batches):
        floors = [o.batch * o.n_tokens / o.floor.total_s for o in shown if o.batch == batch and o.floor]
        if floors:
            axis.hlines(max(floors), x - 0.45, x + 0.45, color="black", label="floor" if x == 0 else "")
    axis.set(title=f"{results.setting.title.split(',')[0]}, {n_tokens} new tokens", ylabel="tokens/s", yscale="log")
    axis.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    reached = [outcome.rate for outcome in shown if outcome.rate]
    axis.set_ylim(bottom=min(reached, default=1.0) / 3)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.08), ncols=3)
