"""Hardware files: what is written is read again, what is wrong is named, and every figure has a source."""

import copy
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from engine.errors import ConfigError
from engine.planner.hardware import BUILT_IN, Hardware
from engine.planner.processor import Curve

NAMES = sorted(path.stem for path in BUILT_IN.glob("*.yaml"))
PROCESSOR: dict[str, Any] = {
    "products": {"bfloat16": {1: 2e10, 8: 1.1e11, 128: 2.2e11}, "float32": 9e10},
    "decode_attention": {262144: 4e9, 33554432: 9e9},
    "chunk_attention": 1e11,
    "memory_bytes_s": 2e10,
    "expand_elements_s": 2.4e9,
    "layer_s": 1e-4,
    "sweep_s": 1e-3,
    "row_s": 2e-5,
}
MACHINE: dict[str, Any] = {
    "name": "box",
    "description": "two cores",
    "device_bytes": 16 * 10**9,
    "device": PROCESSOR,
    "disk_bytes": 10**11,
    "disk_read": 1.2e9,
    "disk_write": 8e8,
    "read_cpu_s": 8e-11,
    "identity": {"cpu": "Zen 5"},
    "sources": {"disk_read": "measured"},
}
WITH_GPU: dict[str, Any] = {**MACHINE, "host": PROCESSOR, "host_bytes": 10**11, "to_device": 1.2e10, "to_host": 1e10}


def read(content: Any) -> Hardware:
    return Hardware.from_dict(copy.deepcopy(content), "box.yaml")


def rising() -> st.SearchStrategy[list[tuple[float, float]]]:
    """Points of a curve, by size."""
    points = st.dictionaries(st.integers(1, 10**9), st.floats(1e-3, 1e15), min_size=1, max_size=6)
    return points.map(lambda known: [(float(size), rate) for size, rate in sorted(known.items())])


@given(rising(), st.floats(0.5, 2e9))
def test_a_curve_stays_between_its_neighbouring_points(points: list[tuple[float, float]], size: float) -> None:
    below = [rate for known, rate in points if known <= size][-1:]
    above = [rate for known, rate in points if known >= size][:1]
    near = below + above
    assert min(near) * (1 - 1e-9) <= Curve(tuple(points))(size) <= max(near) * (1 + 1e-9)


@given(rising(), st.lists(st.floats(0.5, 2e9), min_size=2, max_size=2))
def test_a_curve_through_rising_rates_rises(points: list[tuple[float, float]], sizes: list[float]) -> None:
    rates = sorted(rate for _, rate in points)
    curve = Curve(tuple((size, rate) for (size, _), rate in zip(points, rates, strict=True)))
    assert curve(min(sizes)) <= curve(max(sizes)) * (1 + 1e-9)


def test_a_curve_is_exact_at_its_points_and_flat_beyond_them() -> None:
    curve = Curve(((1.0, 10.0), (100.0, 1000.0)))
    assert [curve(size) for size in (0.1, 1, 100, 1e6)] == [10, 10, 1000, 1000]
    assert curve(10) == pytest.approx(100), "a straight line on logarithmic axes"


@pytest.mark.parametrize("content", [MACHINE, WITH_GPU], ids=["cpu", "gpu"])
def test_what_is_written_is_read_again(content: dict[str, Any], tmp_path: Path) -> None:
    hardware = read(content)
    hardware.save(tmp_path / "new" / "box.yaml")
    assert Hardware.load(tmp_path / "new" / "box.yaml") == hardware == read(hardware.to_dict())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["box.yaml"]


def test_a_gpu_has_a_memory_of_its_own() -> None:
    assert read(WITH_GPU).separate
    assert not read(MACHINE).separate


def test_a_single_rate_is_one_for_all_sizes() -> None:
    assert read(MACHINE).device.products["float32"](7) == 9e10


def test_figures_are_named_by_their_paths() -> None:
    figures = read(WITH_GPU).figures()
    assert figures["disk_read"] == 1.2e9
    assert figures["host.layer_s"] == 1e-4
    assert figures["device.products.bfloat16"] == Curve(((1.0, 2e10), (8.0, 1.1e11), (128.0, 2.2e11)))
    assert not any(name.startswith(("host", "to_")) for name in read(MACHINE).figures())


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_of_a_built_in_file_has_a_source(name: str) -> None:
    hardware = Hardware.load(name)
    assert hardware.name == name
    assert set(hardware.sources) == set(hardware.figures())
    assert all(hardware.sources.values())
    assert hardware.separate == (name != "laptop-cpu")
    assert not hardware.identity


@pytest.mark.parametrize("name", NAMES)
def test_products_of_a_built_in_file_do_not_slow_down_with_more_rows(name: str) -> None:
    hardware = Hardware.load(name)
    for processor in (hardware.device, hardware.host):
        for curve in processor.products.values() if processor else ():
            rates = [rate for _, rate in curve.points]
            assert rates == sorted(rates)


def test_the_built_in_machines_are_there() -> None:
    assert NAMES == ["a100-40gb", "a100-80gb", "h100-80gb", "h200", "laptop-cpu", "rtx-4090", "t4"]


def changed(path: str, value: Any) -> dict[str, Any]:
    """MACHINE with the entry at a path like "device.layer_s" replaced; by nothing, if ``value`` is KeyError."""
    content = copy.deepcopy(MACHINE)
    *folders, last = path.split(".")
    inner = content
    for folder in folders:
        inner = inner[folder]
    if value is KeyError:
        del inner[last]
    else:
        inner[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("name", KeyError, "box.yaml lacks 'name'"),
        ("name", 7, "box.yaml: name is 7; it must be text"),
        ("device_bytes", "16GB", "box.yaml: device_bytes is '16GB'; it must be a number from 1 to 1e+24"),
        ("device_bytes", 0, "device_bytes is 0"),
        ("disk_read", -1.0, "disk_read is -1.0"),
        ("disk_read", "1e9", "disk_read is '1e9'; it must be a number from 1 to 1e+24, written like 1.5e+9"),
        ("device.layer_s", 1e9, "layer_s is 1000000000.0; it must be a number from 1e-15 to 10000"),
        ("disk_read", True, "disk_read is True"),
        ("disk_read", float("nan"), "disk_read is nan"),
        ("disk_read", 1e-300, "disk_read is 1e-300; it must be a number from 1 to 1e+24"),
        ("disk_read", 10**400, "disk_read is 1000000"),
        ("disk_read", 0, "a machine with a disk needs disk_read and disk_write"),
        ("disc_read", 1e9, "box.yaml has 'disc_read', which is no key"),
        ("identity", ["cpu"], "identity is ['cpu']; it must be a mapping of names to text"),
        ("device", 5, "box.yaml: device is 5; it must be a mapping"),
        ("device.layer_s", "fast", "box.yaml: device: layer_s is 'fast'"),
        ("device.chunk_attention", KeyError, "box.yaml: device lacks 'chunk_attention'"),
        ("device.speed", 1, "box.yaml: device has 'speed'"),
        ("device.products", {}, "box.yaml: device: products are of nothing; they must be of some of bfloat16"),
        ("device.products.int3", 1e9, "box.yaml: device: products are of int3"),
        ("device.products.float32", {}, "products: float32 is {}; it must be a rate, or a mapping of sizes to rates"),
        ("device.products.float32", {0: 1e9}, "float32 is 0"),
        ("device.products.float32", {8: "x"}, "float32 at 8 is 'x'"),
        ("device.decode_attention", None, "decode_attention is None"),
        ("host", PROCESSOR, "a machine with a host beside its device needs host_bytes, to_device, to_host"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(changed(path, value))
    assert message in str(raised.value)


@pytest.mark.parametrize("content", ["", "- 1\n", "just text\n"])
def test_a_file_that_holds_no_mapping_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "box.yaml").write_text(content)
    with pytest.raises(ConfigError, match="it must be a mapping of keys to figures"):
        Hardware.load(tmp_path / "box.yaml")


@pytest.mark.parametrize("content", [b"name: [", b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_parsed_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "box.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read"):
        Hardware.load(tmp_path / "box.yaml")


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"hardware 'b200' cannot be read .* h100-80gb, h200, laptop-cpu"):
        Hardware.load("b200")


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/box\.yaml cannot be written"):
        read(MACHINE).save(tmp_path / "file" / "box.yaml")
