"""Decode and prefill speed in memory, against transformers' ``generate`` on the same weights, prompts and threads.

The contestants take turns in one run. Every figure is the median over the rounds; a ratio is the median of the
rounds' ratios. Beside them stands the machine's own limit: the time to read the weights and the KV cache once from
memory, or to do the products, whichever is longer, at rates measured in the same run.
"""

import argparse
import statistics
import time
from dataclasses import asdict, dataclass

import matplotlib
import torch
from transformers import StoppingCriteria
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from benchmarks.limits import product_rate, read_bandwidth
from benchmarks.profile_sweep import PARTS, profile_decode
from benchmarks.prompts import prompts
from benchmarks.report import Report, parser, show
from engine.checkpoint.store import resolve
from engine.device import usable_cores
from engine.kv import BLOCK, KVFormat
from engine.llm import LLM
from engine.request import SamplingParams
from engine.sizes import Sizes
from engine.units import Unit

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BOUNDS = {1: 1.4, 8: 1.8, 32: 2.2}


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of one round."""

    prefill: float
    decode: float


class Clock(StoppingCriteria):
    """Notes when transformers has made a token; never stops it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def run_transformers(
    model: torch.nn.Module, ids: list[list[int]], n_tokens: int, device: str = "cpu"
) -> tuple[Speed, list[list[int]]]:
    """One round of ``generate``: greedy, no end of sequence, all prompts of one length."""
    inputs, clock = torch.tensor(ids, device=device), Clock()
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=n_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[clock],
        )
    decode_s = clock.times[-1] - clock.times[0]
    speed = Speed(inputs.numel() / (clock.times[0] - start), len(ids) * (n_tokens - 1) / decode_s)
    return speed, output[:, inputs.shape[1] :].tolist()


def run_helios(llm: LLM, ids: list[list[int]], n_tokens: int) -> tuple[Speed, list[list[int]]]:
    """One round of this engine: prefill timed alone, decode from when every sequence has its first token."""
    start = time.perf_counter()
    llm.generate(ids, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    prefill_s = time.perf_counter() - start
    params = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    engine = llm.engine
    for prompt in ids:
        request = llm.request(prompt, params)
        tokens[request.request_id] = []
        deliver = tokens[request.request_id]
        engine.add(engine.prepare(request, lambda d, into=deliver: into.extend(t.id for t in d.tokens)))
    while not all(tokens.values()):
        engine.step()
    before, start = sum(map(len, tokens.values())), time.perf_counter()
    while engine.has_work:
        engine.step()
    decode_s = time.perf_counter() - start
    decoded = sum(map(len, tokens.values())) - before
    return Speed(sum(map(len, ids)) / prefill_s, decoded / decode_s), list(tokens.values())


def floor_ms(llm: LLM, batch: int, length: int, bandwidth: float, rate: float) -> tuple[float, str]:
    """Least time of a decode sweep, and which limit it is."""
    spec, dtype = llm.engine.spec, llm.engine.device.dtype
    weights = Sizes(spec, dtype).all_matrices
    kv = batch * length * KVFormat(spec, dtype).block_bytes * spec.n_layers / BLOCK
    memory_s = (weights + kv) / bandwidth
    products_s = 2 * batch * weights / dtype.itemsize / rate
    return max(memory_s, products_s) * 1e3, "memory" if memory_s > products_s else "products"


def same_length_prompts(llm: LLM, batch: int, length: int, data: str | None) -> list[list[int]]:
    """``batch`` prompts of exactly ``length`` tokens: texts of the data, one after another, cut."""
    text = llm.engine.tokenizer.encode("\n\n".join(prompts(200, data)))
    text *= 1 + batch * length // len(text)
    return [text[i * length : (i + 1) * length] for i in range(batch)]


def measure(args: argparse.Namespace, report: Report) -> None:
    torch.set_num_threads(args.threads)
    rounds, n_tokens = (2, 8) if args.quick else (args.rounds, args.tokens)
    directory = resolve(args.model)
    dtype = getattr(torch, args.dtype)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    llm = LLM(str(directory), dtype=args.dtype, threads=args.threads, context=2048)
    bandwidth, rate = read_bandwidth(), product_rate(dtype)
    report.figures |= {"model": args.model, "dtype": args.dtype, "threads": args.threads, "prompt": args.prompt}
    report.figures |= {"read_GB_s": bandwidth / 1e9, "product_GFLOP_s": rate / 1e9, "batches": {}}
    for batch in args.batches:
        ids = same_length_prompts(llm, batch, args.prompt, args.data)
        ours, theirs, same = [], [], []
        run_transformers(reference, ids, 3), run_helios(llm, ids, 3)
        for _ in range(rounds):
            speed, expected = run_transformers(reference, ids, n_tokens)
            theirs.append(speed)
            speed, got = run_helios(llm, ids, n_tokens)
            ours.append(speed)
            same.append(sum(a == b for a, b in zip(expected, got, strict=True)) / batch)
        floor, limit = floor_ms(llm, batch, args.prompt + n_tokens // 2, bandwidth, rate)
        sweep_ms = 1e3 * batch / statistics.median(s.decode for s in ours)
        decode_ratio = statistics.median(a.decode / b.decode for a, b in zip(ours, theirs, strict=True))
        prefill_ratio = statistics.median(a.prefill / b.prefill for a, b in zip(ours, theirs, strict=True))
        report.figures["batches"][batch] = {
            "helios": _median(ours),
            "transformers": _median(theirs),
            "decode_ratio": decode_ratio,
            "prefill_ratio": prefill_ratio,
            "rounds": [{"helios": asdict(a), "transformers": asdict(b)} for a, b in zip(ours, theirs, strict=True)],
            "identical_sequences": statistics.mean(same),
            "decode_sweep_ms": sweep_ms,
            "floor_ms": floor,
            "floor_is": limit,
            "share_of_limit": floor / sweep_ms,
            "prefill_share_of_product_rate": _prefill_share(llm, ours, rate),
            "decode_parts_ms": profile_decode(llm, ids),
        }
        if batch in BOUNDS:
            report.target(f"decode, batch {batch}, against transformers", decode_ratio, BOUNDS[batch])
        report.target(f"prefill, batch {batch}, against transformers", prefill_ratio, 1.0)


def _median(speeds: list[Speed]) -> dict[str, float]:
    return {name: statistics.median(getattr(s, name) for s in speeds) for name in ("prefill", "decode")}


def _prefill_share(llm: LLM, speeds: list[Speed], rate: float) -> float:
    """Of the measured product rate; embedding and head, which see one row a prompt, are left out."""
    spec = llm.engine.spec
    layers = sum(Sizes(spec, torch.int8).matrices(Unit(kind)) for kind in ("attention", "mlp")) * spec.n_layers
    return 2 * layers * statistics.median(s.prefill for s in speeds) / rate


def table(report: Report) -> None:
    rows = []
    for batch, f in report.figures["batches"].items():
        us, hf = f["helios"], f["transformers"]
        for kind in ("decode", "prefill"):
            share = f["share_of_limit"] if kind == "decode" else f["prefill_share_of_product_rate"]
            limit = f["floor_is"] if kind == "decode" else "products"
            cells = [f"{us[kind]:.0f}", f"{hf[kind]:.0f}", f"{f[kind + '_ratio']:.2f}", f"{share:.0%} of {limit}"]
            rows.append([f"{kind}, batch {batch}", *cells])
    show("Tokens/s", ["", "helios", "transformers", "ratio", "share of the machine's limit"], rows)
    parts = [
        [f"batch {batch}", *(f"{f['decode_parts_ms'][part]:.2f}" for part in PARTS), f"{f['floor_ms']:.2f}"]
        for batch, f in report.figures["batches"].items()
    ]
    show("Where a decode sweep's time goes (ms, profiled)", ["", *PARTS, "floor"], parts)


def draw(report: Report) -> None:
    batches = report.figures["batches"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    at = range(len(batches))
    for offset, name in ((-0.2, "transformers"), (0.2, "helios")):
        left.bar([x + offset for x in at], [f[name]["decode"] for f in batches.values()], 0.4, label=name)
    for x, f in zip(at, batches.values(), strict=True):
        left.text(x + 0.2, f["helios"]["decode"], f"{f['decode_ratio']:.2f}x", ha="center", va="bottom")
    left.set(title="Decode", ylabel="tokens/s", xticks=list(at), xticklabels=[f"batch {b}" for b in batches])
    left.legend()
    bottom = [0.0] * len(batches)
    for part in PARTS:
        heights = [f["decode_parts_ms"][part] for f in batches.values()]
        right.bar(at, heights, 0.5, bottom=bottom, label=part)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    right.scatter(at, [f["floor_ms"] for f in batches.values()], color="black", marker="_", s=900, label="floor")
    right.set(title="A decode sweep", ylabel="ms", xticks=list(at), xticklabels=[f"batch {b}" for b in batches])
    right.legend(fontsize=8)
    figure.suptitle(f"{report.figures['model']}, {report.figures['dtype']}, {report.figures['threads']} threads")
    figure.tight_layout()
    report.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(report.picture, dpi=120)


def main() -> None:
    arguments = parser("inmemory", __doc__.splitlines()[0])
    arguments.add_argument("--model", default="smollm2-135m-instruct")
    arguments.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    arguments.add_argument("--threads", type=int, default=usable_cores())
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    arguments.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    arguments.add_argument("--tokens", type=int, default=64, help="new tokens")
    arguments.add_argument("--rounds", type=int, default=5)
    args = arguments.parse_args()
    report = Report("inmemory", args)
    measure(args, report)
    table(report)
    draw(report)
    report.finish()


if __name__ == "__main__":
    main()
