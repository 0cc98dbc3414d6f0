"""Early exits: what each says, and what plain decoding, exits per token, a fixed depth and lossless drafts cost.

All ways serve the same prompts (chat, maths, code, completion, summaries) with the heads that come with Helios, in turn
in every round; a ratio is the median of the rounds' ratios to plain decoding. Perplexity is that of a way's text under
the whole model, from one more pass over it. "Per layer" is the trunk's speed without its heads: rows times layers
computed a second.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from benchmarks.prompts import FILES, prompts
from benchmarks.report import Report, parser, show
from engine.batch import Batch
from engine.checkpoint.store import resolve
from engine.config import format_bytes
from engine.device import usable_cores
from engine.llm import LLM
from engine.passes.check import Check
from engine.request import Completion, SamplingParams
from engine.sweep import ExitHead

matplotlib.use("Agg")
from matplotlib import pyplot as plt

MODELS = ("smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct")
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
KINDS = (*FILES, "completion.jsonl")
FREQUENT = 4096
"""Tokens that the exits' checks look among."""
POSITIONS = 512
"""Of a sequence, when the largest batch in a budget is told."""


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    settings: dict[str, Any]


def mixed(count: int, data: str | None) -> list[str]:
    """Prompts of every kind in turn, completion among them where there is a data folder."""
    folder = data or os.environ.get("HELIOS_DATA")
    if folder is None:
        return prompts(count)
    kinds = [(Path(folder) / name).read_text(encoding="utf-8").splitlines() for name in KINDS]
    return [json.loads(kinds[i % len(kinds)][i // len(kinds)])["prompt"] for i in range(count)]


def ways(exits: list[int]) -> list[Way]:
    checks = {"early_exit": True, "check_vocabulary": FREQUENT}
    early = [Way(f"per token, {th or 'calibrated'}", {**checks, "exit_threshold": th}) for th in (None, 0.8, 0.5)]
    whole = Way("per token, 0.8, whole head", {"early_exit": True, "exit_threshold": 0.8})
    depths = [Way(f"depth {layer}", {"depth": layer}) for layer in exits]
    lossless = [Way(f"lossless, drafts at {layer}", {"draft_depth": layer}) for layer in exits[-2:]]
    return [Way("plain", {}), *early, whole, *depths, *lossless]


class HeadClock:
    """Adds up the time that heads take, checks and logits alike, so that what remains is the trunk's."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._kinds = [(kind, kind.result) for kind in (ExitHead, Check)]

    def __enter__(self) -> "HeadClock":
        for kind, result in self._kinds:
            kind.result = self._timed(result)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for kind, result in self._kinds:
            kind.result = result  # type: ignore[method-assign]

    def _timed(self, result: Callable[[Any, Batch], Tensor]) -> Callable[[Any, Batch], Tensor]:
        def timed(head: Any, batch: Batch) -> Tensor:
            start = time.perf_counter()
            made = result(head, batch)
            self.seconds += time.perf_counter() - start
            return made

        return timed


class Contest:
    """One model, its prompts and its engines."""

    def __init__(self, model: str, args: argparse.Namespace) -> None:
        self.model, self.args = model, args
        self.rounds, self.tokens, count = (1, 8, 5) if args.quick else (args.rounds, args.tokens, args.prompts)
        with self.engine() as llm:
            spec = llm.engine.spec
            tokenizer = llm.engine.tokenizer
            texts = mixed(count, args.data)
            chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
            self.prompts = [ids[-256:] for ids in chats]
            self.exits, self.n_layers = [end.layer for end in spec.exits], spec.n_layers

    def engine(self, **settings: Any) -> LLM:
        fields = {"context": 512, "max_sequences": self.args.batch, "kv_tokens": 512 * self.args.batch}
        return LLM(self.model, threads=self.args.threads, **fields | settings)

    def params(self, tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

    def profile(self) -> dict[str, Any]:
        """What every exit says of the text that the whole model makes."""
        with self.engine(score_exits=True) as llm:
            llm.generate(self.prompts, self.params(self.tokens))
            profile = llm.engine.exit_profile
        assert profile is not None, "exits are scored"
        return {
            str(layer): {
                "agreement": profile.agreement(layer),
                "calibration_error": profile.calibration_error(layer),
                "perplexity_of_its_own": 2.718281828 ** profile.mean_nll(layer),
                "at": {str(th): [profile.satisfied(layer, th), profile.agreement(layer, th)] for th in THRESHOLDS},
            }
            for layer in self.exits
        }

    def speeds(self) -> dict[str, Any]:
        """Every way's speed, depth, memory and text."""
        found: dict[str, dict[str, Any]] = {}
        chosen = ways(self.exits)
        rates: dict[str, list[float]] = {way.name: [] for way in chosen}
        layer_rates: dict[str, list[float]] = {way.name: [] for way in chosen}
        for round_number in range(self.rounds):
            for way in chosen:
                with self.engine(**way.settings) as llm:
                    llm.generate(self.prompts[:1], self.params(2))
                    prefill_s, prefill_heads_s, prefill_layers, _ = self.timed(llm, 1)
                    seconds, heads_s, layers, done = self.timed(llm, self.tokens)
                    made = sum(len(each.tokens) - 1 for each in done)
                    rates[way.name].append(made / (seconds - prefill_s))
                    trunk_s = seconds - prefill_s - (heads_s - prefill_heads_s)
                    layer_rates[way.name].append((layers - prefill_layers) / trunk_s)
                    if round_number == 0:
                        stats = llm.engine.stats()
                        depth = statistics.mean(token.depth for each in done for token in each.tokens)
                        found[way.name] = {"depth": depth, "memory": stats.memory, "done": done}
                gc.collect()
        for name, figures in found.items():
            figures["tokens_s"] = statistics.median(rates[name])
            for ratio, measured in (("ratio", rates), ("layers_ratio", layer_rates)):
                pairs = zip(measured[name], measured["plain"], strict=True)
                figures[ratio] = statistics.median(mine / plain for mine, plain in pairs)
        self.judge({name: figures.pop("done") for name, figures in found.items()}, found)
        return found

    def timed(self, llm: LLM, tokens: int) -> tuple[float, float, int, list[Completion]]:
        """Seconds that generating takes, those of them in heads, rows times layers computed, and what came of it."""
        before = self.computed(llm)
        with HeadClock() as heads:
            start = time.perf_counter()
            done = llm.generate(self.prompts, self.params(tokens))
            seconds = time.perf_counter() - start
        layers = self.computed(llm) - before
        if not llm.engine.kept:  # a plain pass counts no rows
            layers = llm.engine.depth * sum(len(each.prompt_ids) + len(each.tokens) - 1 for each in done)
        return seconds, heads.seconds, layers, done

    def computed(self, llm: LLM) -> int:
        """Rows times layers so far, where tokens may stop at exits."""
        ends = [*sorted(llm.engine.kept), self.n_layers]
        lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return sum(rows * length for rows, length in zip(llm.engine.stats().segment_rows, lengths, strict=False))

    def judge(self, texts: dict[str, list[Completion]], found: dict[str, dict[str, Any]]) -> None:
        """Perplexity of every way's text under the whole model, and how much of it is the plain one's."""
        reference = AutoModelForCausalLM.from_pretrained(resolve(self.model), dtype=torch.float32).eval()
        for name, done in texts.items():
            lost, count, same = 0.0, 0, 0
            for each, plain in zip(done, texts["plain"], strict=True):
                ids = [token.id for token in each.tokens]
                with torch.inference_mode():
                    logits = reference(torch.tensor([[*each.prompt_ids, *ids]])).logits[0]
                said = logits[len(each.prompt_ids) - 1 : -1].log_softmax(-1)
                lost -= float(said.gather(1, torch.tensor(ids)[:, None]).sum())
                count += len(ids)
                same += ids == [token.id for token in plain.tokens]
            found[name] |= {"perplexity": 2.718281828 ** (lost / count), "identical": same / len(done)}

    def batches(self) -> dict[str, int]:
        """Sequences of POSITIONS that have room in a budget in which the whole model has room for few."""
        with self.engine() as llm:
            uses = llm.engine.stats().memory
        fixed = sum(size for use, size in uses.items() if use not in ("kv", "capacity"))
        kv = uses["kv"] // self.args.batch // 512 * POSITIONS * 4
        found = {"budget": fixed + kv}
        for depth in (*self.exits, self.n_layers):
            settings = {"depth": depth, "memory_bytes": fixed + kv, "kv_tokens": None, "max_sequences": 512}
            with LLM(self.model, threads=self.args.threads, context=POSITIONS, prefill_rows=128, **settings) as llm:
                found[str(depth)] = llm.engine.stats().kv_blocks_total * 16 // POSITIONS
        return found

    def lossless(self) -> dict[str, Any]:
        """Drafts at the last but one exit, the deep layers in memory and on disk, against the whole model there."""
        draft = self.exits[-2]
        count, tokens = (5, 8) if self.args.quick else (50, 32)
        with self.engine() as llm:
            chats = [[{"role": "user", "content": text}] for text in mixed(count, self.args.data)]
            asked = [llm.engine.tokenizer.apply_chat_template(chat)[-256:] for chat in chats]
        disk = {
            "device": ["embedding", f"layers.0-{draft - 1}", "head"],
            "disk": [f"layers.{draft}-{self.n_layers - 1}"],
        }
        found: dict[str, Any] = {"draft_depth": draft, "prompts": count, "tokens": tokens}
        for place, weights in (("in memory", None), ("deep layers on disk", disk)):
            made, seconds, stats = [], [], None
            for settings in ({}, {"draft_depth": draft}):
                # In float32 a row's logits do not depend on its batch, so that texts can be compared to the last token.
                with self.engine(weights=weights, dtype="float32", **settings) as llm:
                    start = time.perf_counter()
                    done = llm.generate(asked, self.params(tokens))
                    seconds.append(time.perf_counter() - start)
                    made.append([[token.id for token in each.tokens] for each in done])
                    stats = llm.engine.stats()
            shallow, deep = stats.segment_rows
            wrong = stats.drafted_tokens - stats.accepted_tokens
            found[place] = {
                "identical": sum(a == b for a, b in zip(*made, strict=True)),
                "accepted_share": stats.accepted_tokens / stats.drafted_tokens,
                "tokens_a_verification": stats.generated_tokens
                / max(1, stats.generated_tokens - stats.accepted_tokens),
                "shallow_rows": shallow,
                "shallow_rows_at_most": sum(map(len, asked)) + count * (tokens - 1) + wrong,
                "deep_rows": deep,
                "speed_up": seconds[0] / seconds[1],
            }
        return found


def measure(args: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(args.threads)
    for model in args.models:
        contest = Contest(model, args)
        figures: dict[str, Any] = {"exits": contest.exits, "layers": contest.n_layers, "profile": contest.profile()}
        report.figures[model] = figures
        figures["ways"] = contest.speeds()
        figures["largest_batch"] = contest.batches()
        figures["lossless"] = contest.lossless()
        report.target(f"{model}: per layer, exits per token", figures["ways"]["per token, 0.8"]["layers_ratio"], 0.95)
        for place in ("in memory", "deep layers on disk"):
            found = figures["lossless"][place]
            report.target(f"{model}: lossless, {place}, identical", found["identical"], figures["lossless"]["prompts"])
            spare = found["shallow_rows_at_most"] - found["shallow_rows"]
            report.target(f"{model}: lossless, {place}, shallow rows spared", spare, 0)


def table(report: Report) -> None:
    for model, figures in report.figures.items():
        rows = [
            [layer, f"{f['agreement']:.0%}", *(f"{share:.0%}, {agrees:.0%}" for share, agrees in f["at"].values())]
            for layer, f in figures["profile"].items()
        ]
        show(f"{model}: tokens so sure, and agreeing", ["exit", "agreement", *map(str, THRESHOLDS)], rows)
        rows = [
            [
                name,
                f"{f['depth']:.1f}",
                f"{f['tokens_s']:.0f}",
                f"{f['ratio']:.2f}",
                f"{f['layers_ratio']:.2f}",
                f"{f['perplexity']:.2f}",
                f"{f['identical']:.0%}",
                format_bytes(sum(size for use, size in f["memory"].items() if use != "capacity")),
            ]
            for name, f in figures["ways"].items()
        ]
        columns = ["way", "depth", "tokens/s", "ratio", "per layer", "perplexity", "as plain", "memory"]
        show(f"{model}, {report.args.batch} at once", columns, rows)
        batch = figures["largest_batch"]
        rows = [[depth, str(count)] for depth, count in batch.items() if depth != "budget"]
        show(f"{model}: sequences of {POSITIONS} in {format_bytes(batch['budget'])}", ["depth", "sequences"], rows)
        rows = [
            [
                place,
                f"{f['identical']} of {figures['lossless']['prompts']}",
                f"{f['accepted_share']:.0%}",
                f"{f['tokens_a_verification']:.2f}",
                f"{f['speed_up']:.2f}",
            ]
            for place, f in figures["lossless"].items()
            if isinstance(f, dict)
        ]
        columns = ["", "identical", "drafts accepted", "tokens a verification", "speed-up"]
        show(f"{model}: lossless, drafts at {figures['lossless']['draft_depth']}, float32", columns, rows)


def draw(report: Report) -> None:
    figure, axes = plt.subplots(1, len(report.figures), figsize=(6 * len(report.figures), 4.4), squeeze=False)
    for axis, (model, figures) in zip(axes[0], report.figures.items(), strict=True):
        for name, f in figures["ways"].items():
            axis.scatter(f["tokens_s"], f["perplexity"])
            axis.annotate(name, (f["tokens_s"], f["perplexity"]), fontsize=7, xytext=(3, 3), textcoords="offset points")
        axis.set(title=model, xlabel="tokens/s", ylabel="perplexity under the whole model")
    figure.tight_layout()
    report.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(report.picture, dpi=120)


def main() -> None:
    arguments = parser("exits", __doc__.splitlines()[0])
    arguments.add_argument("--models", nargs="+", default=list(MODELS))
    arguments.add_argument("--threads", type=int, default=usable_cores())
    arguments.add_argument("--batch", type=int, default=8)
    arguments.add_argument("--prompts", type=int, default=25)
    arguments.add_argument("--tokens", type=int, default=32, help="new tokens")
    arguments.add_argument("--rounds", type=int, default=2)
    args = arguments.parse_args()
    report = Report("exits", args)
    measure(args, report)
    table(report)
    draw(report)
    report.finish()


if __name__ == "__main__":
    main()
