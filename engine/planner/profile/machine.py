"""Measuring a whole machine."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from ...config import EngineConfig
from ...device import Device, open_device
from ..hardware import Hardware
from ..processor import SAME, Curve, Processor
from .activations import memory_rate
from .attention import attention_rates
from .disk import measure_disk
from .identity import default_offload_dir, identity
from .links import link_rates
from .overhead import measure_overhead
from .products import (
    INT4,
    INT8,
    as_read_ratio,
    decode_products,
    expansion_rate,
    packed_rates,
    product_rates,
    small_ratio,
)
from .quiet import QUIET_CORES, others_busy
from .store import machine_name
from .timing import FULL, QUICK, Effort, Progress

Result = TypeVar("Result")
MEASURED = "measured"
BUFFERED = "through the page cache: this file system has no direct I/O"
DISK_FIGURES = ("disk_read", "disk_write", "disk_latency_s", "disk_piece_s", "read_cpu_s")


def profile_machine(
    device: str = "auto",
    *,
    offload_dir: str | Path | None = None,
    dtype: str = "auto",
    threads: int | None = None,
    quick: bool = False,
    progress: Progress | None = None,
) -> Hardware:
    """Measure this machine as an engine with these settings will use it, in about a minute; ``quick`` in ten seconds.

    Nothing else should run meanwhile; if it does, ``progress`` and ``sources`` say so. ``device``, ``dtype``,
    ``threads`` and ``offload_dir`` are as in EngineConfig. Raises ConfigError for what they may not be, for a device
    that is not there and for a disk without room, HeliosError if ``offload_dir`` cannot be written to.
    """
    config = EngineConfig(model="", device=device, dtype=dtype, threads=threads).validate()
    effort = QUICK if quick else FULL
    directory = Path(offload_dir).expanduser().absolute() if offload_dir else default_offload_dir()
    known = identity(device, directory)
    opened = open_device(config)
    step = Steps(progress)
    busy = others_busy()
    if busy > QUIET_CORES:
        step.notice(f"other processes keep {busy:.1f} cores busy: what is measured will be too slow")
    disk = step(
        "disk", partial(measure_disk, directory, effort.disk_bytes, effort.rounds, opened, decode_products(opened))
    )
    dtypes = dict.fromkeys((*opened.fast_dtypes, opened.dtype))
    measured = Hardware(
        name=machine_name(),
        description=_describe(known),
        device=measure_processor(config, opened, dtypes, effort, step),
        device_bytes=opened.total_bytes(),
        disk_bytes=disk.free_bytes,
        disk_read=disk.read,
        disk_write=disk.write,
        disk_latency_s=disk.latency_s,
        disk_piece_s=disk.piece_s,
        read_cpu_s=disk.read_cpu_s,
        identity=known,
    )
    if opened.host is not opened:
        host, config = opened.host, replace(config, device="cpu", dtype="auto")
        to_device, to_host = step("link", partial(link_rates, opened, effort))
        measured = replace(
            measured,
            host=measure_processor(config, host, host.fast_dtypes, effort, step, "host "),
            host_bytes=host.total_bytes(),
            to_device=to_device,
            to_host=to_host,
        )
    busy = max(busy, others_busy())
    how = MEASURED if busy <= QUIET_CORES else f"{MEASURED} while other processes kept {busy:.1f} cores busy"
    sources = dict.fromkeys(measured.figures(), how)
    if not disk.direct:
        sources |= dict.fromkeys(DISK_FIGURES, f"{how}, {BUFFERED}")
    return replace(measured, sources=sources)


class Steps:
    """Does the steps of a profile, and tells of each when it begins and ends."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress or (lambda _name, _done, _total: None)

    def notice(self, text: str) -> None:
        self._progress(text, 0, 0)

    def __call__(self, name: str, measure: Callable[[], Result]) -> Result:
        self._progress(name, 0, 1)
        result = measure()
        self._progress(name, 1, 1)
        return result


def measure_processor(
    config: EngineConfig, device: Device, dtypes: Iterable[torch.dtype], effort: Effort, step: Steps, where: str = ""
) -> Processor:
    """A processor as engines with ``config`` use it: ``device`` does attention and expands codes.

    Products of plain weights are measured in ``dtypes``. ``where`` begins the names of the steps.
    """
    products: dict[str, Curve] = {}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        other = device if dtype == device.dtype else open_device(replace(config, dtype=name))
        products[name] = step(f"{where}products, {name}", partial(product_rates, other, effort))
    for name, scheme in (("int4", INT4), ("int8", INT8)):
        rates = step(f"{where}products, {name}", partial(packed_rates, device, scheme, effort))
        if rates:
            products[name] = rates
    decode, chunks = step(f"{where}attention", partial(attention_rates, device, effort))
    overhead = step(f"{where}overhead", partial(measure_overhead, config, device, effort))
    return Processor(
        products=products,
        small=step(f"{where}small products", partial(small_ratio, device, effort)) if not where else SAME,
        as_read=step(f"{where}products as read", partial(as_read_ratio, device, effort)),
        decode_attention=decode,
        chunk_attention=chunks,
        memory_bytes_s=step(f"{where}activations", partial(memory_rate, device, effort)),
        expand_elements_s=step(f"{where}expansion of codes", partial(expansion_rate, device, effort)),
        layer_s=overhead.layer_s,
        sweep_s=overhead.sweep_s,
        row_s=overhead.row_s,
    )


def _describe(known: Mapping[str, str]) -> str:
    cores = f"{known['cpu']}, {known['cores']} cores, {known['memory']}"
    return cores if known["gpu"] == "none" else f"{known['gpu']} beside {cores}"
