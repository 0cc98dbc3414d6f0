"""The contests: all contestants on one checkpoint, within one limit, at several batches and lengths."""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.offload.floor import Shape, weights_on_disk
from benchmarks.offload.harness import HELIOS, Harness, Outcome, Program, write_prompts
from benchmarks.offload.models import OPT_1_3B, SMALL, checkpoint, random_prompts
from benchmarks.offload.protocol import Job
from engine.checkpoint.store import resolve
from engine.errors import HeliosError
from engine.kv import BLOCK

MIB = 2**20
RESERVE_BYTES = 48 * MIB
"""What helios leaves of the limit for the interpreter's and the allocator's own growth."""
SPLITS = 2
"""Times a peer that ran out of memory may try again with half as many sequences at once."""
REAL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Setting:
    """A checkpoint and a limit."""

    title: str
    model: str
    shape: Shape
    limit_bytes: Mapping[str, int]
    """For each contestant."""
    reserve_bytes: int
    most_kv_bytes: int
    """KV that helios keeps in memory; more goes to disk, all of it."""
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    """Numbers of new tokens."""
    prompt: int = 128


@dataclass(slots=True)
class Results:
    setting: Setting | None = None
    skipped: str = ""
    """Why there are none."""
    outcomes: list[Outcome] = field(default_factory=list)

    def of(self, contestant: str, batch: int, n_tokens: int) -> Outcome | None:
        found = (o for o in self.outcomes if (o.contestant, o.batch, o.n_tokens) == (contestant, batch, n_tokens))
        return next(found, None)


def random_setting(args: argparse.Namespace, cache: Path, names: list[str]) -> Setting:
    """The main contest: a random model in OPT-1.3B's shape, or under ``--quick`` a small one."""
    name, config = ("opt-small-random", SMALL) if args.quick else ("opt-1.3b-random", OPT_1_3B)
    directory = checkpoint(cache / "models", name, config)
    return Setting(
        title=f"{name}, {weights_on_disk(directory) / 1e9:.2f} GB of bf16 weights",
        model=str(directory),
        shape=Shape.of(str(directory)),
        limit_bytes=dict.fromkeys(names, args.memory_mib * MIB),
        reserve_bytes=RESERVE_BYTES,
        most_kv_bytes=args.memory_mib * MIB // 2,
        batches=tuple(args.batches),
        lengths=tuple(args.tokens),
    )


def real_setting(args: argparse.Namespace, harness: Harness, programs: list[Program]) -> Setting | str:
    """The contest of a real model with a quarter of its weights as memory; or why there is none."""
    try:
        directory = resolve(REAL)
    except HeliosError as error:
        return str(error)
    quarter = weights_on_disk(directory) // 4
    prompts = write_prompts(harness.cache / "base-prompts.json", [[1]])
    bases = {}
    for program in programs:
        job = Job(program.name, str(directory), prompts, 1, harness.threads, 2**40, 0, "", 1)
        bases[program.name] = harness.base_bytes(program, job)
    return Setting(
        title=f"{REAL}, {quarter / 1e6:.0f} MB (a quarter of its weights) beside each process's own memory",
        model=str(directory),
        shape=Shape.of(str(directory)),
        limit_bytes={name: base + quarter for name, base in bases.items()},
        reserve_bytes=8 * MIB,
        most_kv_bytes=quarter // 4,
        batches=(1,) if args.quick else (1, 8),
        lengths=(4,) if args.quick else (32,),
    )


def hold(setting: Setting, harness: Harness, programs: list[Program]) -> Iterator[Outcome]:
    """Every contestant at every batch and length, one after another."""
    for batch in setting.batches:
        for n_tokens in setting.lengths:
            for program in programs:
                yield attempt(setting, harness, program, batch, n_tokens)


def attempt(
    setting: Setting,
    harness: Harness,
    program: Program,
    batch: int,
    n_tokens: int,
    options: Mapping[str, Any] | None = None,
) -> Outcome:
    """One contestant's run. A peer starts with as many sequences at once as its KV has room for, then fewer."""
    vocab = json.loads((Path(setting.model) / "config.json").read_text())["vocab_size"]
    prompts = write_prompts(harness.cache / "prompts.json", random_prompts(batch, setting.prompt, vocab))
    limit = setting.limit_bytes[program.name]
    job = Job(
        contestant=program.name,
        model=setting.model,
        prompts_file=prompts,
        n_tokens=n_tokens,
        threads=harness.threads,
        limit_bytes=limit,
        kv_token_bytes=setting.shape.kv_token_bytes,
        offload_dir="",
        at_once=batch,
    )
    if program is HELIOS:
        chosen = helios_options(setting, batch, n_tokens) if options is None else options
        return harness.run(
            program, replace(job, options={"reserve_bytes": setting.reserve_bytes, **chosen}), setting.shape
        )
    sequence = (setting.prompt + n_tokens) * setting.shape.kv_token_bytes
    at_once = batch
    while at_once > 1 and at_once * sequence > limit // 2:
        at_once //= 2
    for _ in range(SPLITS + 1):
        # Keys and values are copied when they grow, one layer at a time, and Accelerate holds a layer on its way.
        weight_bytes = max(limit // 16, limit - limit // 4 - int(1.25 * at_once * sequence))
        outcome = harness.run(
            program, replace(job, at_once=at_once, options={"weight_bytes": weight_bytes}), setting.shape
        )
        if outcome.end != "out of memory" or at_once == 1:
            break
        at_once = max(1, at_once // 2)
    return outcome


def helios_options(setting: Setting, batch: int, n_tokens: int) -> dict[str, Any]:
    """All sequences in one block, their KV in memory if it may take so much, else on disk."""
    context = setting.prompt + n_tokens
    positions = batch * -(-context // BLOCK) * BLOCK
    options: dict[str, Any] = {"context": context, "max_sequences": batch, "max_queued": batch}
    options["prefill_rows"] = min(512, batch * setting.prompt)
    if positions * setting.shape.kv_token_bytes <= setting.most_kv_bytes:
        return options | {"kv_tokens": positions}
    return options | {"kv_tokens": 0, "kv_disk_tokens": positions}
