"""Is the planner right? Predicted against measured speed, FlexGen's table, and latency against throughput.

python -m benchmarks.planner [--parts accuracy ablation paper frontier] [--models smollm2 opt]
"""

import argparse
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib
import torch

from benchmarks.offload.floor import weights_on_disk
from benchmarks.offload.models import OPT_1_3B, checkpoint
from benchmarks.planner import accuracy, frontier, paper
from benchmarks.report import Report, parser, show
from engine.checkpoint.store import resolve
from engine.device import usable_cores
from engine.planner.hardware import Hardware
from engine.planner.job import Job
from engine.planner.plan import Plan
from engine.planner.profile.machine import profile_machine
from engine.planner.reference.model import OPT_30B, OPT_175B
from engine.planner.reference.paper import TABLE, predictions
from engine.planner.search import busy_shares
from engine.planner.simulator.run import Simulation
from engine.planner.task import Task
from engine.quant.copy import quantise_model
from engine.quant.format import Quantisation
from engine.quant.scheme import Scheme
from engine.spec import ModelSpec

matplotlib.use("Agg")
from matplotlib.figure import Figure

PARTS = ("accuracy", "ablation", "paper", "frontier")
MODELS = ("smollm2", "opt")
SMOLLM2 = "smollm2-135m-instruct"


def main() -> None:
    arguments = parser("planner", __doc__.splitlines()[0])
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    arguments.add_argument("--hardware", help="a profile to use instead of measuring the machine first")
    arguments.add_argument("--threads", type=int, default=usable_cores())
    arguments.add_argument("--cache", default=str(Path.home() / ".cache/helios/benchmarks"), help="for checkpoints")
    args = arguments.parse_args()
    report = Report("planner", args)
    hardware = (
        Hardware.load(args.hardware) if args.hardware else profile_machine(threads=args.threads, quick=args.quick)
    )
    report.figures["hardware"] = hardware.to_dict()
    if "accuracy" in args.parts:
        run_accuracy(report, args, hardware)
    if "ablation" in args.parts:
        run_ablation(report, args, hardware)
    if "paper" in args.parts:
        run_paper(report)
    if "frontier" in args.parts:
        run_frontier(report, args, hardware)
    report.finish()


def run_accuracy(report: Report, args: argparse.Namespace, hardware: Hardware) -> None:
    """Every plan of every model, one after another."""
    compared: list[accuracy.Compared] = []
    for name in args.models:
        model = (
            SMOLLM2 if name == "smollm2" else str(checkpoint(Path(args.cache) / "models", "opt-1.3b-random", OPT_1_3B))
        )
        copy = quantised(Path(args.cache) / "models", resolve(model))
        batches = (1, 8) if args.quick else (1, 8, 32)
        for case in accuracy.cases(
            model, str(copy), weights_on_disk(resolve(model)) / 1e6, batches, 4 if args.quick else 16
        ):
            simulation = accuracy.predict(case, hardware)
            with TemporaryDirectory(dir=args.cache) as folder:
                measured = accuracy.measure(case, args.threads, Path(folder))
            bound = busiest(simulation)
            compared.append(accuracy.Compared(f"{name}: {case.name}", measured, simulation.throughput, bound))
            print(f"{compared[-1].name}: measured {measured:.2f}, predicted {simulation.throughput:.2f}", flush=True)
    rows = [[c.name, f"{c.measured:.2f}", f"{c.predicted:.2f}", f"{c.error:.0%}", c.bound] for c in compared]
    show("Tokens/s", ["plan", "measured", "predicted", "error", "bound"], rows)
    errors = [c.error for c in compared]
    right, pairs = accuracy.ranked_right(compared)
    report.figures["accuracy"] = [{**asdict(c), "error": c.error} for c in compared]
    report.target("median accuracy (1 - error)", 1 - statistics.median(errors), 0.85)
    report.target("least accuracy (1 - error)", 1 - max(errors), 0.6)
    report.target("share of clearly different pairs in the right order", right / max(1, pairs), 1.0)
    scatter(report.picture, compared)


def run_ablation(report: Report, args: argparse.Namespace, hardware: Hardware) -> None:
    """The offload engine with one idea switched off at a time, in simulation and for real."""
    model = str(checkpoint(Path(args.cache) / "models", "opt-1.3b-random", OPT_1_3B))
    compared = []
    for case in accuracy.ablation(model, batch=8 if args.quick else 32, gen_len=16):
        simulation = accuracy.predict(case, hardware)
        with TemporaryDirectory(dir=args.cache) as folder:
            measured = accuracy.measure(case, args.threads, Path(folder))
        bound = busiest(simulation)
        compared.append(accuracy.Compared(case.name, measured, simulation.throughput, bound))
    rows = [[c.name, f"{c.measured:.2f}", f"{c.predicted:.2f}", f"{c.error:.0%}", c.bound] for c in compared]
    show("Ablation, tokens/s", ["", "measured", "predicted", "error", "bound"], rows)
    report.figures["ablation"] = [{**asdict(c), "error": c.error} for c in compared]
    report.target("ablation: least accuracy (1 - error)", 1 - max(c.error for c in compared), 0.75)


def run_paper(report: Report) -> None:
    """FlexGen's table: its formulas, its policies in whole units, and our plans, all on its machine."""
    formulas = {(p.row.model.name, p.row.s, p.row.label): p for p in predictions()}
    rows, figures, ratios = [], [], []
    for found in paper.matches():
        row, ours = found.row, found.ours
        formula = formulas[row.model.name, row.s, row.label]
        policy = f"{found.paper.throughput:.2f}" if found.paper else "does not fit"
        name = f"{row.model.name}, {row.s}, {row.label}"
        cells = [f"{row.throughput:.2f}", f"{formula.cost.throughput:.2f}", policy]
        rows.append([name, *cells, f"{ours.simulation.throughput:.2f}", str(ours.config.max_sequences)])
        figures.append(
            {
                "row": name,
                "measured": row.throughput,
                "formulas": formula.cost.throughput,
                "policy_simulated": found.paper.throughput if found.paper else None,
                "refused": found.refused,
                "plan_simulated": ours.simulation.throughput,
                "plan": Plan.of(ours.config, "t4 of the paper", paper.task(row).job).summary(),
            }
        )
        if found.paper:
            ratios.append(found.ratio)
    show("OPT on a T4, tokens/s", ["", "paper", "formulas", "its policy", "our plan", "block"], rows)
    report.figures["paper"] = figures
    report.target("our plan to the paper's policy, simulated, the least", min(ratios), 1.0)


def run_frontier(report: Report, args: argparse.Namespace, hardware: Hardware) -> None:
    """The best plan under each latency limit: OPT on the paper's machine, SmolLM2 on this one."""
    lines: dict[str, list[frontier.Point]] = {}
    for row in (row for row in TABLE if row.s == 512 and row.model in (OPT_30B, OPT_175B)):
        lines[f"{row.model.name}, {row.label}, T4"] = frontier.frontier(paper.task(row), 2 if args.quick else 8)
    lines["SmolLM2 in 150 MB, here"] = live_frontier(args, hardware)
    report.figures["frontier"] = {name: [point.figures() for point in points] for name, points in lines.items()}
    frontier.draw(report.picture.with_name("frontier.png"), lines)


def live_frontier(args: argparse.Namespace, hardware: Hardware) -> list[frontier.Point]:
    """SmolLM2's plans for this machine, each carried out for real as well."""
    spec = ModelSpec.from_directory(resolve(SMOLLM2))
    job = Job(accuracy.PROMPT, 16, 64)
    given = Task(SMOLLM2, spec, hardware, job, torch.bfloat16, memory_bytes=150_000_000)
    points = []
    for point in frontier.frontier(given, 2 if args.quick else 5):
        case = accuracy.Case("frontier", point.config, replace(job, n_sequences=point.block))
        with TemporaryDirectory(dir=args.cache) as folder:
            points.append(replace(point, measured=accuracy.measure(case, args.threads, Path(folder))))
    return points


def quantised(folder: Path, source: Path) -> Path:
    """The copy in 4 bits, made if it is not there."""
    directory = folder / f"{source.resolve().name}-4bit"
    if not directory.is_dir():
        quantise_model(source, directory, Quantisation(Scheme(4, 64)), lambda *_: None, False)
    return directory


def busiest(simulation: Simulation) -> str:
    """The resource that decides."""
    shares = {name: share for name, share in busy_shares(simulation.timeline).items() if name != "waiting"}
    return next((f"{name} {share:.0%}" for name, share in shares.items()), "")


def scatter(path: Path, compared: list[accuracy.Compared]) -> None:
    """Predicted over measured, on logarithmic axes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    for name in sorted({c.name.split(":")[0] for c in compared}):
        own = [c for c in compared if c.name.startswith(f"{name}:")]
        axes.scatter([c.measured for c in own], [c.predicted for c in own], label=name, s=18)
    ends = [f([c.measured for c in compared]) for f in (min, max)]
    axes.plot(ends, ends, color="#999999", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="measured tokens/s", ylabel="predicted tokens/s")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
