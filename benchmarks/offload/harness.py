"""Runs a contestant in a process of its own, under its limits, and tells how it ended."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.offload.cgroup import Group, memory_group
from benchmarks.offload.floor import Floor, Rates, Shape, floor, prefill_rows
from benchmarks.offload.pagecache import drop
from benchmarks.offload.protocol import Job, events

ROOT = Path(__file__).resolve().parents[2]
PROBE_S = 1.5
"""Seconds of reading that measure the disk, before a run and after it."""
PROBE_LIMIT_S = 180
MOST_CACHED = 0.01
"""Of a checkpoint's pages, how many may be cached outside a contestant's limit before a run is called unfair."""

End = Literal["done", "out of memory", "time limit", "failed"]


@dataclass(frozen=True, slots=True)
class Program:
    """A contestant's Python, module and environment."""

    name: str
    python: str
    module: str
    environment: Mapping[str, str]


HELIOS = Program("helios", sys.executable, "benchmarks.offload.ours", {})


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run went. Rates are tokens a second; of a run that was stopped they hold for what it had done."""

    contestant: str
    batch: int
    prompt: int
    n_tokens: int
    at_once: int
    end: End
    reason: str = ""
    load_s: float = 0.0
    total_s: float = 0.0
    """Of the generation; of a run that was stopped, up to its last token or the stop."""
    tokens: int = 0
    decode_rate: float = 0.0
    limit_bytes: int = 0
    base_bytes: int = 0
    """The process's own memory before it loaded the model."""
    own_bytes: int = 0
    """The process's own memory at the last word of it."""
    peak_bytes: int = 0
    """The most its control group held, page cache included."""
    cached_share: float = 0.0
    """Of the checkpoint's pages, those in the page cache outside the limit when the run began."""
    rates: Rates | None = None
    floor: Floor | None = None
    output: tuple[tuple[int, ...], ...] = ()

    @property
    def rate(self) -> float:
        """Generated tokens over the whole time of generating, prefill included."""
        return self.tokens / self.total_s if self.total_s else 0.0

    @property
    def most_rate(self) -> float:
        """A bound that ``rate`` of the whole run cannot exceed: as if all had been done at the stop; 0 if it broke."""
        if self.end == "time limit":
            return self.batch * self.n_tokens / self.total_s if self.total_s else 0.0
        return self.rate if self.end == "done" else 0.0

    @property
    def share(self) -> float:
        """Of the floor's speed: 1 is as fast as can be."""
        return self.rate * self.floor.total_s / (self.batch * self.n_tokens) if self.floor else 0.0

    @property
    def decode_share(self) -> float:
        if not self.floor or not self.floor.decode_s:
            return 0.0
        return self.decode_rate * self.floor.decode_s / (self.batch * (self.n_tokens - 1))

    def figures(self) -> dict[str, Any]:
        """For the JSON, without the tokens."""
        values = asdict(self) | {"rate": self.rate, "share_of_floor": self.share, "decode_share": self.decode_share}
        del values["output"]
        return values


@dataclass(frozen=True, slots=True)
class Harness:
    """Where contestants run, and for how long."""

    cache: Path
    """Checkpoints, the peers' environment; each run's offload folder while it runs."""
    threads: int
    limit_s: float
    """Seconds for one run's generation and loading."""
    enforce: bool
    """Whether a control group can be made."""

    def run(self, program: Program, job: Job, shape: Shape) -> Outcome:
        """Measure the machine and then the contestant, in one fresh control group. Nothing is left behind."""
        ids = job.prompts()
        batch, prompt = len(ids), len(ids[0])
        outcome = Outcome(program.name, batch, prompt, job.n_tokens, job.at_once, "failed", limit_bytes=job.limit_bytes)
        with self._folder() as folder, memory_group(job.limit_bytes if self.enforce else None) as group:
            job = replace(job, offload_dir=str(folder / "offload"))
            rates = self._probe(job, shape, batch, prompt, folder, group)
            cached = drop(Path(job.model).glob("*.safetensors"))
            if cached > MOST_CACHED:
                print(f"{cached:.0%} of the checkpoint is in the page cache outside the limit; {program.name} profits")
            ended, output, errors, killed = self._execute(program, job, folder, group, self.limit_s)
            outcome = _judge(outcome, ended, output, errors, killed, self.limit_s, group)
            if rates is not None:
                after = self._probe(job, shape, batch, prompt, folder, group)
                rates = rates.disk_averaged(after) if after else rates
                best = floor(shape, rates, job.limit_bytes, batch, prompt, job.n_tokens)
                outcome = replace(outcome, rates=rates, floor=best)
            return replace(outcome, cached_share=cached)

    def base_bytes(self, program: Program, job: Job) -> int:
        """A contestant's own memory when it has all but the model."""
        with self._folder() as folder:
            job = replace(job, offload_dir=str(folder / "offload"), options={**job.options, "base_only": True})
            _, output, errors, _ = self._execute(program, job, folder, None, PROBE_LIMIT_S)
        said = [event for event in events(output) if event["event"] == "base"]
        if not said:
            raise RuntimeError(f"{program.name} did not start: {_last_line(errors)}")
        return int(said[0]["own_bytes"])

    def _probe(
        self, job: Job, shape: Shape, batch: int, prompt: int, folder: Path, group: Group | None
    ) -> Rates | None:
        rows = [batch, prefill_rows(batch, prompt)]
        options = {"seconds": PROBE_S, "rows": rows, "hidden": shape.hidden, "mlp": shape.mlp}
        program = replace(HELIOS, module="benchmarks.offload.probe")
        _, output, errors, _ = self._execute(program, replace(job, options=options), folder, group, PROBE_LIMIT_S)
        said = [event for event in events(output) if event["event"] == "probe"]
        if not said:
            print(f"the machine could not be measured within the limit: {_last_line(errors)}")
            return None
        products = {int(count): float(rate) for count, rate in said[0]["product_flops_s"]}
        disk = said[0]["disk_bytes_s"]
        return Rates(disk, products[rows[1]], products[rows[0]], (disk, disk), said[0]["base_bytes"])

    def _execute(
        self, program: Program, job: Job, folder: Path, group: Group | None, limit_s: float
    ) -> tuple[int | None, str, str, bool]:
        """Exit status (None: stopped at the time limit), standard output, standard error, killed for memory."""
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(self.threads)}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **program.environment}
        enter = f"echo $$ > '{group.procs}' && " if group else ""
        command = ["/bin/sh", "-c", f'{enter}exec "$@"', "sh", program.python, "-m", program.module, job.to_argument()]
        kills = group.kills() if group else 0
        out, err = folder / "out.txt", folder / "err.txt"
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=stdout, stderr=stderr, start_new_session=True
            )
            try:
                ended: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                ended = None
            finally:
                _end(process)
        killed = bool(group and group.kills() > kills)
        return ended, out.read_text(errors="replace"), err.read_text(errors="replace"), killed

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=self.cache))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def write_prompts(file: Path, ids: list[list[int]]) -> str:
    file.write_text(json.dumps(ids))
    return str(file)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the contestant and the processes it began."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _judge(
    outcome: Outcome, ended: int | None, output: str, errors: str, killed: bool, limit_s: float, group: Group | None
) -> Outcome:
    said = events(output)
    by_name = {event["event"]: event for event in said}
    steps = [event for event in said if event["event"] == "tokens"]
    done, load = by_name.get("done"), by_name.get("loaded", {}).get("s", 0.0)
    end: End = "done" if done else "time limit" if ended is None else "out of memory" if killed else "failed"
    reason = _last_line(errors) if end == "failed" else f"stopped after {limit_s:.0f} s" if end == "time limit" else ""
    refused = end == "failed" and any(word in reason for word in ("OutOfMemory", "MemoryError", "Cannot allocate"))
    seconds, tokens = 0.0, 0
    for last, step in zip([{"s": 0.0, "tokens": 0}, *steps], steps, strict=False):
        if step["decoding"]:
            seconds += step["s"] - last["s"]
            tokens += step["tokens"] - last["tokens"]
    stopped_s = limit_s - load if end == "time limit" and "loaded" in by_name else 0.0
    return replace(
        outcome,
        end="out of memory" if refused else end,
        reason=reason,
        load_s=load,
        total_s=done["s"] if done else stopped_s or (steps[-1]["s"] if steps else 0.0),
        tokens=steps[-1]["tokens"] if steps else 0,
        decode_rate=tokens / seconds if seconds else 0.0,
        base_bytes=by_name.get("base", {}).get("own_bytes", 0),
        own_bytes=max((event.get("own_bytes", 0) for event in said), default=0),
        peak_bytes=group.peak_bytes() if group else 0,
        output=tuple(map(tuple, done["output"])) if done else (),
    )


def _last_line(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    found = [line for line in lines if "Error" in line]
    return (found or lines or ["it said nothing"])[-1][:300]
