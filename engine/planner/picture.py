"""A sweep's timeline as a picture: what was busy when."""

from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError
from .simulator.clock import Busy

COLOURS = {
    "computing": "#4477aa",
    "products": "#4477aa",
    "small operations": "#66ccee",
    "scheduling and sampling": "#bb5566",
    "handing over": "#ddaa33",
    "lookups": "#997700",
    "activations": "#88ccaa",
    "decode attention": "#228833",
    "prompt attention": "#228833",
    "expanding weights": "#aa3377",
    "expanding KV": "#aa3377",
    "load": "#ccbb44",
    "store": "#ee6677",
    "": "#bbbbbb",
}
LANES = ("device", "host", "waiting", "to device read", "to host read", "host memory read", "host memory write")


def draw(timeline: Sequence[Busy], path: Path, title: str, from_s: float = 0.0, to_s: float | None = None) -> None:
    """Write a picture (PNG, SVG or PDF by its name) of the timeline between two seconds.

    Raises ConfigError where matplotlib is not installed or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ConfigError("a picture needs matplotlib; install it with `pip install matplotlib`") from None
    end_s = to_s if to_s is not None else max((busy.end_s for busy in timeline), default=1.0)
    shown = [busy for busy in timeline if busy.end_s > from_s and busy.start_s < end_s]
    lanes = sorted({busy.resource for busy in shown}, key=lambda name: (_rank(name), name))
    figure = Figure(figsize=(12, 1.3 + 0.5 * max(1, len(lanes))), layout="constrained")
    axes = figure.subplots()
    for row, lane in enumerate(lanes):
        for what in sorted({busy.what for busy in shown if busy.resource == lane}):
            spans = [(b.start_s, b.end_s - b.start_s) for b in shown if b.resource == lane and b.what == what]
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=COLOURS.get(what, "#999999"))
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlim(from_s, end_s)
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left")
    kinds = [what for what in COLOURS if what and any(busy.what == what for busy in shown)]
    if kinds:
        patches = [Patch(color=COLOURS[what], label=what) for what in kinds]
        figure.legend(handles=patches, loc="outside lower center", fontsize="small", ncols=min(6, len(kinds)))
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the picture {path} cannot be written: {error}; name a .png, .svg or .pdf") from None


def _rank(name: str) -> int:
    return LANES.index(name) if name in LANES else len(LANES)
