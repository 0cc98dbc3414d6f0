"""What a planning command's options mean."""

from pathlib import Path

import torch
import typer

from engine.checkpoint.store import resolve
from engine.config import DTYPES, format_bytes, parse_bytes
from engine.errors import ConfigError
from engine.numbers import is_number
from engine.planner.hardware import Hardware
from engine.planner.job import Job
from engine.planner.profile.identity import why_stale
from engine.planner.profile.store import stored_profile
from engine.planner.task import Task
from engine.quant.format import Quantisation
from engine.quant.scheme import Scheme
from engine.spec import ModelSpec

_PREFERRED = ("bfloat16", "float16", "float32")


def task_of(
    model: str,
    hardware: str | None,
    job: Job,
    limits: tuple[str | None, str | None, str | None, float | None],
    *,
    dtype: str | None,
    bits: int | None,
    kv_int4: bool,
    depth: int | None,
    stages: int,
) -> Task:
    """A task from a command's options; ``limits`` are of device, host, disk and latency.

    Raises ConfigError naming the option, and what the model's config raises.
    """
    directory = Path(model) if (Path(model) / "config.json").is_file() else resolve(model)
    spec = ModelSpec.from_directory(directory)
    if depth is not None:
        if not 1 <= depth <= spec.n_layers:
            raise ConfigError(f"depth is {depth}; this model has layers 1 to {spec.n_layers}")
        spec = spec.cut(depth)
    machine = _machine(hardware)
    *sizes, latency_limit_s = limits
    memory, host, disk = (None if size is None else parse_bytes(size) for size in sizes)
    if latency_limit_s is not None and not (is_number(latency_limit_s) and latency_limit_s > 0):
        raise ConfigError(f"latency-limit is {latency_limit_s:g}; it must be seconds above 0")
    for name, size, most in (
        ("budget", memory, machine.device_bytes),
        ("host-budget", host, machine.host_bytes),
        ("disk-budget", disk, machine.disk_bytes),
    ):
        if size is not None and not 0 < size <= most:
            raise ConfigError(
                f"{name} is {format_bytes(size)} and '{machine.name}' has {format_bytes(most)}; give a size above 0 "
                "that it has, or leave it out"
            )
    quantisation = Quantisation.of(directory)
    if bits is not None and (quantisation is None or quantisation.scheme.bits != bits):
        if quantisation is not None:
            raise ConfigError(f"{model} is quantised already: {quantisation.scheme.describe()}; leave --quantize out")
        quantisation = Quantisation(Scheme(4 if bits == 4 else 8, 64 if bits == 4 else None).validate())
    return Task(
        model=model,
        spec=spec,
        hardware=machine,
        job=job.validate(spec),
        dtype=_dtype(dtype, machine),
        quantisation=quantisation,
        memory_bytes=memory,
        host_bytes=host,
        disk_bytes=disk,
        latency_limit_s=latency_limit_s,
        kv_int4=kv_int4,
        depth=depth,
        stages=stages,
    ).validate()


def _machine(hardware: str | None) -> Hardware:
    if hardware is not None:
        return Hardware.load(hardware)
    stored = stored_profile()
    if stored is None:
        raise ConfigError("this machine has not been measured; run `helios profile`, or name one with --hardware")
    if stale := why_stale(stored):
        typer.echo(f"warning: {stale}", err=True)
    elif disturbed := next((source for source in stored.sources.values() if "other processes" in source), None):
        typer.echo(f"warning: '{stored.name}' was {disturbed}; measure again while it is idle", err=True)
    return stored


def _dtype(asked: str | None, machine: Hardware) -> torch.dtype:
    known = [name for name in _PREFERRED if name in machine.device.products]
    name = asked or (known[0] if known else "")
    if name not in DTYPES or name not in known:
        raise ConfigError(f"dtype is '{name}'; rates of '{machine.name}' are known for {', '.join(known)}")
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
