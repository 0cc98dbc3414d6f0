"""Models larger than the memory: helios against transformers, Accelerate and DeepSpeed within one enforced limit.

Each contestant is a process of its own in a fresh control group whose limit counts the page cache too. Beside every
figure stands the floor: the bytes that must be read at the disk's rate, or the products at the processor's, both
measured around the run in the same group. The second part switches one idea off at a time; the third runs a real model.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

from benchmarks.offload.ablation import run as run_ablation
from benchmarks.offload.cgroup import remove_stale, why_not
from benchmarks.offload.contest import MIB, Results, Setting, hold, random_setting, real_setting
from benchmarks.offload.environment import NAMES, peers
from benchmarks.offload.harness import HELIOS, Harness, Outcome, Program
from benchmarks.offload.tables import ablation_table, contest_table, draw, end_of
from benchmarks.report import Report, parser
from engine.device import usable_cores

BOUNDS = {1: 1.5, 8: 2.0, 32: 3.0}
"""Of helios' tokens a second to the best peer's, by batch."""
FLOOR_BOUND = 0.85
PARTS = ("contest", "ablation", "real")


def arguments() -> argparse.Namespace:
    made = parser("offload", (__doc__ or "").splitlines()[0])
    made.add_argument("--ablation", action="store_true", help="only the ablation; the same as --parts ablation")
    made.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    made.add_argument("--contestants", nargs="+", choices=[HELIOS.name, *NAMES], default=[HELIOS.name, *NAMES])
    made.add_argument("--batches", type=int, nargs="+", help="default: 1 8 32 64")
    made.add_argument("--tokens", type=int, nargs="+", help="new tokens; default: 16 64")
    made.add_argument("--ablation-batch", type=int, help="default: 32")
    made.add_argument("--memory-mib", type=int, help="the limit of the main contest; default: 2048")
    made.add_argument("--limit-s", type=float, default=300, help="seconds a contestant's run may take")
    made.add_argument("--threads", type=int, default=min(2, usable_cores()))
    made.add_argument(
        "--cache", default="~/.cache/helios/benchmarks", help="for checkpoints and the peers' environment"
    )
    args = made.parse_args()
    args.parts = ["ablation"] if args.ablation else args.parts
    args.batches = args.batches or ([1, 4] if args.quick else [1, 8, 32, 64])
    args.tokens = args.tokens or ([4] if args.quick else [16, 64])
    args.ablation_batch = args.ablation_batch or (8 if args.quick else 32)
    args.memory_mib = args.memory_mib or (320 if args.quick else 2048)
    return args


def note(outcome: Outcome, name: str = "") -> Outcome:
    """A line as soon as there is something to tell."""
    what = name or f"batch {outcome.batch}, {outcome.n_tokens} new tokens"
    print(f"{outcome.contestant}, {what}: {end_of(outcome)} {outcome.reason}", flush=True)
    return outcome


def contest(setting: Setting, harness: Harness, programs: list[Program], results: Results) -> None:
    results.setting = setting
    for outcome in hold(setting, harness, programs):
        results.outcomes.append(note(outcome))


def targets(report: Report, results: Results) -> None:
    """Of a peer that was stopped the most it can have reached counts; one that broke counts as nothing."""
    ours = [outcome for outcome in results.outcomes if outcome.contestant == HELIOS.name]
    if ours:
        report.target("share of the floor, best batch", max(outcome.share for outcome in ours), FLOOR_BOUND)
    for batch, bound in BOUNDS.items():
        ratios = []
        for outcome in (outcome for outcome in ours if outcome.batch == batch):
            peers_best = max(
                (o.most_rate for name in NAMES if (o := results.of(name, batch, outcome.n_tokens))), default=0.0
            )
            if peers_best:
                ratios.append(outcome.rate / peers_best if outcome.end == "done" else 0.0)
        if ours and batch in results_batches(results) and not ratios:
            print(f"batch {batch}: no peer finished or was still running at the time limit; there is no ratio")
        if ratios:
            report.target(f"batch {batch}, against the best peer", min(ratios), bound)


def results_batches(results: Results) -> set[int]:
    return {outcome.batch for outcome in results.outcomes if outcome.contestant in NAMES}


def agreement(results: Results) -> dict[str, float]:
    """Share of tokens equal to helios', by contestant: the contestants do the same work."""
    shares: dict[str, list[float]] = {}
    for outcome in results.outcomes:
        ours = results.of(HELIOS.name, outcome.batch, outcome.n_tokens)
        if ours and ours.output and outcome.output and outcome is not ours:
            pairs = [
                a == b for x, y in zip(ours.output, outcome.output, strict=True) for a, b in zip(x, y, strict=True)
            ]
            shares.setdefault(outcome.contestant, []).append(sum(pairs) / len(pairs))
    return {name: sum(found) / len(found) for name, found in shares.items()}


def figures(results: Results) -> dict[str, Any]:
    if results.setting is None:
        return {"left_out": results.skipped}
    return {
        "setting": results.setting.title,
        "limit_bytes": dict(results.setting.limit_bytes),
        "runs": [outcome.figures() for outcome in results.outcomes],
        "tokens_equal_to_helios": agreement(results),
    }


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that groups and folders are cleaned up
    cache = Path(os.path.expanduser(args.cache))
    cache.mkdir(parents=True, exist_ok=True)
    report = Report("offload", args)
    remove_stale()
    unlimited = why_not()
    if unlimited:
        print(f"UNFAIR: no memory limit can be enforced here ({unlimited}); peers use all memory there is")
    harness = Harness(cache, args.threads, args.limit_s, enforce=unlimited is None)
    wanted = [name for name in NAMES if name in args.contestants]
    found, missing = peers(cache) if wanted and set(args.parts) != {"ablation"} else ({}, {})
    for name, reason in missing.items():
        print(f"{name} is left out: {reason}")
    programs = [HELIOS] * (HELIOS.name in args.contestants) + [found[name] for name in wanted if name in found]
    report.figures |= {"threads": args.threads, "limit_s": args.limit_s, "memory_bytes": args.memory_mib * MIB}
    report.figures |= {"limit_enforced": unlimited is None, "unfair_because": unlimited, "peers_left_out": missing}
    main_contest, real, variants = Results(skipped="not asked for"), Results(skipped="not asked for"), {}
    if "contest" in args.parts or "ablation" in args.parts:
        setting = random_setting(args, cache, [HELIOS.name, *NAMES])
        if "contest" in args.parts:
            contest(setting, harness, programs, main_contest)
        if "ablation" in args.parts:
            for name, outcome in run_ablation(setting, harness, args.ablation_batch, args.tokens[0]):
                variants[name] = note(outcome, name)
    if "real" in args.parts:
        chosen = real_setting(args, harness, programs)
        if isinstance(chosen, str):
            real.skipped = chosen
        else:
            contest(chosen, harness, programs, real)
    contest_table(main_contest)
    if variants:
        ablation_table(variants)
    contest_table(real)
    targets(report, main_contest)
    report.figures |= {"contest": figures(main_contest), "real": figures(real)}
    report.figures["ablation"] = {name: outcome.figures() for name, outcome in variants.items()}
    draw(report.picture, main_contest, real, variants)
    report.finish()


if __name__ == "__main__":
    main()
