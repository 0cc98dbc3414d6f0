"""The CUDA path, exercised on a machine with a GPU: the same logits and tokens as on the CPU, and its speed.

Needs no download: random models of SmolLM2's and OPT's shape are made in a temporary folder.
"""

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from transformers import LlamaConfig, MistralConfig, OPTConfig, PretrainedConfig, Qwen3Config

from benchmarks.inmemory import run_helios, run_transformers
from benchmarks.random_model import TOKENIZER_SIZE, save_random
from benchmarks.report import Report, parser, show
from engine.llm import LLM
from engine.request import Delta, SamplingParams

matplotlib.use("Agg")
from matplotlib import pyplot as plt

LOGPROB_TOLERANCE = 2e-3
REST = ["layers.2-3"]


def shapes(quick: bool) -> dict[str, PretrainedConfig]:
    """One model of each kind of block: gated with grouped heads, sliding window, head norms, learned positions."""
    layers, hidden = (4, 256) if quick else (12, 768)
    common = {
        "vocab_size": 8192,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "max_position_embeddings": 2048,
    }
    gated = {**common, "intermediate_size": 3 * hidden, "num_key_value_heads": 2}
    return {
        "llama": LlamaConfig(**gated),
        "mistral-window": MistralConfig(**gated, sliding_window=100),
        "qwen3": Qwen3Config(**gated, head_dim=64),
        "opt": OPTConfig(**common, ffn_dim=4 * hidden, word_embed_proj_dim=hidden),
    }


def prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, TOKENIZER_SIZE, (count, length), generator=generator).tolist()


def compare(directory: Path) -> dict[str, float]:
    """Greedy float32 tokens and log-probabilities on both devices, mixed lengths in one batch."""
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    ids = [prompt[:length] for prompt, length in zip(prompts(8, 300), (1, 5, 64, 65, 130, 200, 299, 300), strict=True)]
    results = {}
    for device in ("cpu", "cuda"):
        llm = LLM(str(directory), device=device, dtype="float32", prefill_rows=128)
        results[device] = llm.generate(ids, params)
        del llm
    pairs = list(zip(results["cpu"], results["cuda"], strict=True))
    same = [[a.id == b.id for a, b in zip(x.tokens, y.tokens, strict=True)] for x, y in pairs]
    first = [abs(x.tokens[0].logprob - y.tokens[0].logprob) for x, y in pairs]
    return {"identical_sequences": sum(map(all, same)) / len(same), "first_logprob_difference": max(first)}


OFFLOADS: dict[str, dict[str, Any]] = {
    "weights on host and disk": {"weights": {"device": ["embedding", "head"], "host": ["layers.0-1"], "disk": REST}},
    "embedding and head on disk": {"weights": {"disk": ["embedding", "head"], "device": ["layers.0-1", *REST]}},
    "KV attended to on the host": {"kv_host_tokens": 4096},
    "KV brought from the host": {"kv_host_tokens": 4096, "delegate": False},
    "KV on disk": {"kv_tokens": 512, "kv_disk_tokens": 4096},
    "hidden states on host and disk": {
        "tile_rows": 64,
        "activation_rows": 64,
        "activation_host_rows": 64,
        "activation_disk_rows": 64,
    },
}
"""Of a model of four layers."""


def offloaded(directory: Path) -> dict[str, float]:
    """Of each placement, the share of float32 sequences whose tokens equal those of a resident model on the GPU."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    ids = [prompt[:length] for prompt, length in zip(prompts(8, 300), (1, 5, 64, 65, 130, 200, 299, 300), strict=True)]
    found = {}
    common: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "prefill_rows": 120,
        "max_sequences": 8,
        "context": 512,
    }
    with LLM(str(directory), **common) as llm:
        expected = [[token.id for token in completion.tokens] for completion in llm.generate(ids, params)]
    for name, settings in OFFLOADS.items():
        with LLM(str(directory), **common, **settings) as llm:
            got = [[token.id for token in completion.tokens] for completion in llm.generate(ids, params)]
        found[name] = sum(a == b for a, b in zip(got, expected, strict=True)) / len(ids)
    return found


EXITS: dict[str, dict[str, Any]] = {
    "exits per token": {"early_exit": True, "exit_threshold": 0.0005},
    "lossless, drafts at layer 2": {"draft_depth": 2},
    "lossless, deep layers on disk": {
        "draft_depth": 2,
        "weights": {"device": ["embedding", "layers.0-1", "head"], "disk": REST},
    },
    "from 2 layers to all": {"depth": 2},
    "from 2 layers to all, by kept states": {"depth": 2, "keep_states": True},
    "parked and back": {"depth": 2},
}
"""Ways to use exits of a model of four layers."""


def exits(directory: Path) -> dict[str, float]:
    """Of each way, the share of float32 sequences whose tokens and depths on the GPU are those on the CPU."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    ids = [prompt[:length] for prompt, length in zip(prompts(4, 200), (1, 64, 65, 200), strict=True)]
    found = {}
    for name, settings in EXITS.items():
        made = []
        for device in ("cpu", "cuda"):
            fields = {"device": device, "dtype": "float32", "context": 512, "max_sequences": 4, "exits": "shared"}
            with LLM(str(directory), **{**fields, **settings}) as llm:
                texts: dict[str, list[tuple[int, int]]] = {}
                for request in (llm.request(prompt, params) for prompt in ids):
                    into = texts.setdefault(request.request_id, [])
                    deliver = partial(_note, into)
                    llm.engine.add(llm.engine.prepare(request, deliver))
                for _ in range(8 if "depth" in settings else 0):
                    llm.engine.step()
                if "park" in name:
                    llm.engine.park()
                if "depth" in settings:
                    llm.change_depth(None)
                while llm.engine.step():
                    pass
                made.append([*texts.values()])
        found[name] = sum(a == b for a, b in zip(*made, strict=True)) / len(ids)
    return found


def _note(into: list[tuple[int, int]], delta: Delta) -> None:
    into.extend((token.id, token.depth) for token in delta.tokens)


def speed(directory: Path, batches: list[int], n_tokens: int) -> dict[int, dict[str, float]]:
    """bfloat16 decode and prefill tokens/s beside transformers on the same GPU."""
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval().to("cuda")
    llm = LLM(str(directory), device="cuda", dtype="bfloat16", max_sequences=max(batches), prefill_rows=4096)
    figures = {}
    for batch in batches:
        ids = prompts(batch, 128)
        run_transformers(reference, ids, 4, "cuda"), run_helios(llm, ids, 4)
        theirs, ours = run_transformers(reference, ids, n_tokens, "cuda")[0], run_helios(llm, ids, n_tokens)[0]
        figures[batch] = {
            "helios_decode": ours.decode,
            "transformers_decode": theirs.decode,
            "decode_ratio": ours.decode / theirs.decode,
            "prefill_ratio": ours.prefill / theirs.prefill,
        }
    return figures


def main() -> None:
    arguments = parser("cuda_check", __doc__.splitlines()[0])
    args: argparse.Namespace = arguments.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no CUDA device; run this on a machine with an NVIDIA GPU")
    report = Report("cuda_check", args)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for name, config in shapes(args.quick).items():
            directory = save_random(Path(folder) / name, config)
            figures = report.figures[name] = compare(directory)
            report.target(f"{name}: CUDA tokens equal CPU tokens", figures["identical_sequences"], 1.0)
            report.target(
                f"{name}: log-probabilities within {LOGPROB_TOLERANCE}",
                float(figures["first_logprob_difference"] <= LOGPROB_TOLERANCE),
                1.0,
            )
            rows.append([name, *(f"{value:.5f}" for value in figures.values())])
        show("float32, CUDA against CPU", ["model", "identical", "log-probability difference"], rows)
        report.figures["offloaded"] = offloaded(save_random(Path(folder) / "offloaded", shapes(quick=True)["llama"]))
        for name, share in report.figures["offloaded"].items():
            report.target(f"{name}: tokens equal a resident model's", share, 1.0)
        report.figures["exits"] = exits(Path(folder) / "offloaded")
        for name, share in report.figures["exits"].items():
            report.target(f"{name}: as on the CPU", share, 1.0)
        report.figures["speed"] = speed(Path(folder) / "llama", [1, 8, 32] if args.quick else [1, 8, 32, 128], 64)
    report.figures["seconds"] = time.perf_counter() - started
    columns = ["batch", "helios tokens/s", "transformers tokens/s", "decode ratio", "prefill ratio"]
    show(
        "bfloat16 on CUDA",
        columns,
        [[str(b), *(f"{v:.2f}" for v in f.values())] for b, f in report.figures["speed"].items()],
    )
    draw(report)
    report.finish()


def draw(report: Report) -> None:
    figure, axis = plt.subplots(figsize=(6, 4))
    for name in ("transformers", "helios"):
        values = [f[f"{name}_decode"] for f in report.figures["speed"].values()]
        axis.plot([str(b) for b in report.figures["speed"]], values, marker="o", label=name)
    axis.set(title="Decode on CUDA, bfloat16", xlabel="batch", ylabel="tokens/s", yscale="log")
    axis.legend()
    figure.tight_layout()
    report.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(report.picture, dpi=120)


if __name__ == "__main__":
    main()
