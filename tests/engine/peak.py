"""``python -m tests.engine.peak WARM_MODEL '{"config": {...}, "lengths": [...], "max_tokens": 4}'``: a job's memory.

Prints the bytes by which the resident memory of this process rose above what it was after everything was imported and
a tiny model had run: the peak while loading and while generating, and the ledger. In a process of its own, since what
an earlier job gave back to the allocator would hide what this one takes.
"""

import dataclasses
import gc
import json
import sys
from pathlib import Path
from typing import Any

from engine.llm import LLM
from engine.request import SamplingParams
from engine.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=4, ignore_eos=True, frequency_penalty=0.1)


def resident_bytes(field: str) -> int:
    """ "VmRSS" or, for the peak, "VmHWM"."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def warm_up(model: str, config: dict[str, Any]) -> None:
    everything_on_disk = {"disk": ["embedding", "head", "layers.0-2"]}
    kv_on_disk = {"kv_tokens": 0, "kv_disk_tokens": 512}
    fields = {"dtype": config["dtype"], "threads": config["threads"], "offload_dir": config["offload_dir"]}
    with LLM(model, memory_bytes=50_000_000, weights=everything_on_disk, **kv_on_disk, **fields) as llm:
        llm.generate([[5] * 40, [6, 7]], GREEDY)
        llm.generate([[5] * 40, [6, 7]], DRAWN)


def main() -> None:
    job = json.loads(sys.argv[2])
    warm_up(sys.argv[1], job["config"])
    tokenizer = Tokenizer.load(Path(job["config"]["model"]))  # a library's, and not what the limit is about
    gc.collect()
    base, peaks = resident_bytes("VmRSS"), {}
    reset_peak()
    with LLM(**job["config"]) as llm:
        peaks["load"] = resident_bytes("VmHWM") - base
        prompts = [[5 + (7 * i + at) % 300 for at in range(length)] for i, length in enumerate(job["lengths"])]
        params = [dataclasses.replace(kind, max_tokens=job["max_tokens"]) for kind in (GREEDY, DRAWN)]
        llm.generate(prompts, [params[i % 2] for i in range(len(prompts))])
        peaks["run"] = resident_bytes("VmHWM") - base
        ledger = llm.engine.tiers["device"].by_use()
    del tokenizer
    sys.stdout.write(json.dumps({"peaks": peaks, "ledger": ledger}) + "\n")


if __name__ == "__main__":
    main()
