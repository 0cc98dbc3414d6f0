"""Profiles: a quick one of this very machine, how it is kept, when it is stale, and that it leaves nothing behind."""

import errno
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from engine.device import CpuDevice, Device, usable_cores
from engine.errors import ConfigError
from engine.memory import total_bytes
from engine.planner.hardware import Hardware
from engine.planner.processor import Curve, Processor
from engine.planner.profile import disk, machine, products
from engine.planner.profile.disk import Disk, measure_disk
from engine.planner.profile.identity import identity, why_stale
from engine.planner.profile.machine import profile_machine
from engine.planner.profile.quiet import others_busy
from engine.planner.profile.store import machine_name, profile_path, stored_profile
from engine.planner.profile.timing import IN_A_ROW, QUICK, Effort, usual_seconds
from engine.quant.matrix import KERNEL_ROWS

MIB = 2**20


class Profiled(NamedTuple):
    hardware: Hardware
    reports: list[tuple[str, int, int]]
    left: list[Path]
    """Files in the offload directory and among the temporary ones, afterwards."""


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    offload, temporary = tmp_path_factory.mktemp("offload"), tmp_path_factory.mktemp("temporary")
    reports: list[tuple[str, int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        hardware = profile_machine(
            "cpu", offload_dir=offload, quick=True, progress=lambda *report: reports.append(report)
        )
    return Profiled(hardware, reports, [*offload.iterdir(), *temporary.iterdir()])


PLAUSIBLE: dict[str, tuple[float, float]] = {
    "device_bytes": (2**28, 2**45),
    "disk_bytes": (2**28, 2**60),
    "disk_read": (1e6, 1e12),
    "disk_write": (1e6, 1e12),
    "disk_latency_s": (1e-7, 0.1),
    "disk_piece_s": (0.0, 0.01),
    "read_cpu_s": (0.0, 1e-7),
    "device.as_read": (0.01, 10.0),
    "device.small": (0.01, 10.0),
    "device.decode_attention": (1e7, 1e13),
    "device.chunk_attention": (1e8, 1e15),
    "device.memory_bytes_s": (1e8, 1e14),
    "device.expand_elements_s": (1e7, 1e13),
    "device.layer_s": (1e-6, 0.1),
    "device.sweep_s": (1e-6, 1.0),
    "device.row_s": (1e-7, 0.1),
}


def test_every_figure_of_this_machine_is_plausible_and_measured(profiled: Profiled) -> None:
    hardware = profiled.hardware
    figures = hardware.figures()
    assert set(hardware.sources) == set(figures)
    assert figures.keys() >= PLAUSIBLE.keys() - {"read_cpu_s", "disk_piece_s"}  # which may be none
    for name, figure in figures.items():
        least, most = (1e7, 1e15) if ".products." in name else PLAUSIBLE[name]
        for value in [rate for _, rate in figure.points] if isinstance(figure, Curve) else [figure]:
            assert least <= value <= most, f"{name} is {figure}"
    assert not hardware.separate
    assert hardware.device_bytes == total_bytes()


def test_products_are_known_for_what_the_cpu_multiplies(profiled: Profiled) -> None:
    known = profiled.hardware.device.products
    assert known.keys() >= {str(dtype).removeprefix("torch.") for dtype in CpuDevice(torch.float32, 1).fast_dtypes}
    for kind, curve in known.items():
        rows = [int(size) for size, _ in curve.points]
        assert rows == [n for n in QUICK.rows if n <= KERNEL_ROWS or not kind.startswith("int")]


def test_more_rows_use_a_weight_more_often(profiled: Profiled) -> None:
    for curve in profiled.hardware.device.products.values():
        assert curve(64) > 1.5 * curve(1)


def test_every_step_is_told_of(profiled: Profiled) -> None:
    begun = [name for name, done, total in profiled.reports if done < total]
    assert begun == [name for name, done, total in profiled.reports if done == total > 0]
    assert begun[0] == "disk", "what may be refused comes first"
    assert len(set(begun)) == len(begun)


def test_a_profile_leaves_no_files(profiled: Profiled) -> None:
    assert profiled.left == []


def test_a_stored_profile_is_read_back_as_it_was(
    profiled: Profiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELIOS_HOME", str(tmp_path))
    assert stored_profile() is None
    profiled.hardware.save(profile_path())
    assert profile_path() == tmp_path / "hardware" / f"{machine_name()}.yaml"
    assert stored_profile() == profiled.hardware


@pytest.mark.parametrize(("host", "name"), [("", "this-machine"), ("a b/c", "a-b-c"), ("gpu-1.lan", "gpu-1.lan")])
def test_a_machine_without_a_proper_name_has_a_file_all_the_same(
    host: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.node", lambda: host)
    assert machine_name() == name


def test_a_profile_of_this_machine_is_not_stale(profiled: Profiled) -> None:
    assert why_stale(profiled.hardware) is None


@pytest.mark.parametrize("name", ["cpu", "cores", "memory", "gpu", "torch", "file_system"])
def test_a_change_of_the_machine_makes_a_profile_stale(profiled: Profiled, name: str) -> None:
    known = profiled.hardware.identity
    reason = why_stale(replace(profiled.hardware, identity={**known, name: "another"}))
    assert reason is not None
    assert f"({name}: another → {known[name]})" in reason
    assert "helios profile" in reason


def test_a_file_of_a_kind_of_machine_is_never_stale() -> None:
    assert why_stale(Hardware.load("t4")) is None


def test_an_identity_says_where_is_offloaded_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELIOS_HOME", str(tmp_path))
    assert identity("cpu")["offload_dir"] == str(tmp_path / "offload")
    assert identity("cpu", tmp_path / "not" / "made")["file_system"] == identity("cpu")["file_system"]
    assert identity("cpu")["gpu"] == "none"


def test_a_disk_without_room_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=100 * MIB))
    monkeypatch.setattr(machine, "others_busy", lambda: 0.0)
    reports: list[tuple[str, int, int]] = []
    with pytest.raises(ConfigError, match=r"a file of 256.00 MiB and .*offload has 100.00 MiB left; free space"):
        profile_machine("cpu", offload_dir=tmp_path / "offload", quick=True, progress=lambda *r: reports.append(r))
    assert reports == [("disk", 0, 1)]
    assert not (tmp_path / "offload").exists()


def test_an_interrupt_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(bench: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(disk._Bench, "read", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure_disk(tmp_path, 64 * MIB, 1, CpuDevice(torch.float32, 1), lambda: 1e-3)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_direct_io_is_measured_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    measured = measure_disk(tmp_path, 64 * MIB, 1, CpuDevice(torch.float32, 1), lambda: 1e-3)
    assert not measured.direct
    assert min(measured.read, measured.write) > 0 == measured.read_cpu_s


@pytest.mark.parametrize("device", ["tpu", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=device):
        profile_machine(device, offload_dir=tmp_path)


def test_codes_are_not_multiplied_where_torch_has_no_kernel_for_them() -> None:
    assert products.packed_rates(CpuDevice(torch.float32, 1), products.INT4, QUICK) is None


def test_runs_take_turns_and_the_median_counts_without_the_first_of_a_turn() -> None:
    calls: list[str] = []
    times = {"a": iter([99.0, 9.0, 8.0, 99.0, 3.0, 5.0]), "b": iter([99.0, 6.0, 7.0, 99.0, 2.0, 9.0])}

    def run(name: str) -> Callable[[], float]:
        def once() -> float:
            calls.append(name)
            return next(times[name])

        return once

    effort = Effort(seconds=0.0, rounds=2, rows=(), kv_bytes=(), disk_bytes=0)
    assert usual_seconds({"a": run("a"), "b": run("b")}, effort) == {"a": 6.5, "b": 6.5}
    assert "".join(calls) == ("a" * (IN_A_ROW + 1) + "b" * (IN_A_ROW + 1)) * effort.rounds


def test_others_keep_no_more_cores_busy_than_there_are() -> None:
    assert 0 <= others_busy() <= usable_cores()


class Accelerator(CpuDevice):
    """A device beside a host, both of which are this machine's cores."""

    def __init__(self) -> None:
        super().__init__(torch.float32, 1)
        self._beside = CpuDevice(torch.float32, 1)

    @property
    def host(self) -> Device:
        return self._beside


def test_beside_a_gpu_the_host_and_the_link_are_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator()
    rate = Curve(((1.0, 1e9),))
    asked: list[tuple[str, Device]] = []

    def measure(config: Any, device: Device, *_: Any) -> Processor:
        asked.append((config.device, device))
        return Processor({"float32": rate}, rate, rate, 1e9, 1e9, 1e-4, 1e-3)

    monkeypatch.setattr(machine, "open_device", lambda config: accelerator)
    monkeypatch.setattr(
        machine, "measure_disk", lambda *_: Disk(10**9, 2e9, 1e9, 1e-10, direct=False, latency_s=1e-4, piece_s=1e-5)
    )
    monkeypatch.setattr(machine, "measure_processor", measure)
    monkeypatch.setattr(machine, "decode_products", lambda _: lambda: 1e-3)
    monkeypatch.setattr(machine, "others_busy", lambda: 1.5)
    reports: list[tuple[str, int, int]] = []
    hardware = profile_machine("auto", offload_dir=tmp_path, quick=True, progress=lambda *r: reports.append(r))
    assert asked == [("auto", accelerator), ("cpu", accelerator.host)]
    assert hardware.separate
    assert hardware.to_device > 0
    assert hardware.to_host > 0
    assert hardware.host_bytes == total_bytes()
    assert set(hardware.sources) == set(hardware.figures())
    assert hardware.sources["host.layer_s"] == "measured while other processes kept 1.5 cores busy"
    assert "page cache" in hardware.sources["disk_read"]
    assert reports[0] == ("other processes keep 1.5 cores busy: what is measured will be too slow", 0, 0)
    assert Hardware.from_dict(hardware.to_dict(), "profile") == hardware
