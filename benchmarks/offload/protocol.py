"""How a contestant is told what to do and says what it did. Standard library alone: peers run without the project's."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MARK = "@@offload "
"""Begins a line of a contestant's standard output that is an event; libraries print others."""


@dataclass(frozen=True, slots=True)
class Job:
    """One contestant's run: continue every prompt greedily by ``n_tokens``, past any end of sequence."""

    contestant: str
    model: str
    prompts_file: str
    """JSON: token ids [batch, length]."""
    n_tokens: int
    threads: int
    limit_bytes: int
    """What the process, page cache included, may take; enforced from outside if it can be."""
    kv_token_bytes: int
    """KV of one position, all layers."""
    offload_dir: str
    """A folder of this run's own, removed afterwards."""
    at_once: int
    """Sequences that run together at most; the batch is done in so many parts as that takes."""
    options: dict[str, Any] = field(default_factory=dict)
    """For helios: fields of EngineConfig, and ``reserve_bytes``; for Accelerate ``weight_bytes``. ``base_only`` ends
    the process before it loads the model."""

    def prompts(self) -> list[list[int]]:
        ids: list[list[int]] = json.loads(Path(self.prompts_file).read_text())
        return ids

    def to_argument(self) -> str:
        return json.dumps(asdict(self))


def job_of_argument() -> Job:
    """The job in this process's first argument."""
    return Job(**json.loads(sys.argv[1]))


def say(event: str, **values: Any) -> None:
    """Tell the harness."""
    sys.stdout.write(f"\n{MARK}{json.dumps({'event': event, **values})}\n")
    sys.stdout.flush()


def events(output: str) -> list[dict[str, Any]]:
    """What a contestant said, in order; a line cut short by its end is left out."""
    lines = (line for line in output.splitlines() if line.startswith(MARK) and line.endswith("}"))
    return [json.loads(line[len(MARK) :]) for line in lines]


def own_bytes() -> int:
    """Memory of this process that is no file's: what a limit counts and no reclaim gives back."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(int(status[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem", "VmPTE"))


class Clock:
    """Notes when tokens are there, and tells the harness, which needs it if the run is stopped."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.tokens = 0

    def made(self, count: int, decoding: bool) -> None:
        """So many more tokens are there; ``decoding`` if no prompt was worked on meanwhile."""
        self.tokens += count
        say("tokens", s=time.perf_counter() - self.start, tokens=self.tokens, decoding=decoding)


def run(job: Job, load: Callable[[Job], Callable[[list[list[int]], Clock], list[list[int]]]]) -> None:
    """``load`` gives what continues prompts; its time is told apart from the generation's."""
    os.makedirs(job.offload_dir, exist_ok=True)
    say("base", own_bytes=own_bytes())
    if job.options.get("base_only"):
        return
    begun = time.perf_counter()
    generate = load(job)
    say("loaded", s=time.perf_counter() - begun, own_bytes=own_bytes())
    clock, output = Clock(), list[list[int]]()
    ids = job.prompts()
    for first in range(0, len(ids), job.at_once):
        output += generate(ids[first : first + job.at_once], clock)
    say("done", s=time.perf_counter() - clock.start, tokens=clock.tokens, output=output, own_bytes=own_bytes())
