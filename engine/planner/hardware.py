"""A machine as the planner sees it: memories, links and processors, read from and written to YAML.

Every figure of a file has a source: a data sheet, a paper, or "measured". ``helios profile`` writes such a file for the
machine it runs on; those of well-known machines are package data (``hardware/*.yaml``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from ..errors import ConfigError, said, shown
from ..files import write_whole
from ..numbers import is_number
from .processor import PRODUCTS, RATES, SAME, Curve, Processor

BUILT_IN = Path(__file__).with_name("hardware")
REST = ("disk_bytes", "disk_read", "disk_write", "disk_latency_s", "disk_piece_s", "to_device", "to_host", "read_cpu_s")
"""Figures that not every machine has."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine. Bandwidths are bytes a second; 0 for what it does not have."""

    name: str
    description: str
    device: Processor
    device_bytes: int
    """Memory of the device; of a machine without a GPU its RAM."""
    host: Processor | None = None
    """The cores beside a GPU; None if they are the device."""
    host_bytes: int = 0
    """RAM beside a GPU."""
    disk_bytes: int = 0
    disk_read: float = 0.0
    disk_write: float = 0.0
    disk_latency_s: float = 0.0
    """Of a read of a few KiB, one after another."""
    disk_piece_s: float = 0.0
    """What a small piece takes beside its bytes while several threads read; 0: as many parts of the latency."""
    to_device: float = 0.0
    to_host: float = 0.0
    read_cpu_s: float = 0.0
    """Processor seconds that reading a byte from disk takes from the products beside it, where both use the cores."""
    identity: Mapping[str, str] = field(default_factory=dict)
    """Of a profile: the machine it was measured on."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each figure comes from, by its path: "device.products.bfloat16"."""

    @property
    def separate(self) -> bool:
        """Whether the device has a memory of its own."""
        return self.host is not None

    def figures(self) -> dict[str, float | Curve]:
        """Every figure that the machine has, by its path as in ``sources``: "device.products.bfloat16"."""
        found: dict[str, float | Curve] = {"device_bytes": self.device_bytes, **_figures("device", self.device)}
        if self.host is not None:
            found |= {"host_bytes": self.host_bytes, **_figures("host", self.host)}
        return found | {name: getattr(self, name) for name in REST if getattr(self, name)}

    @classmethod
    def load(cls, name_or_path: str | Path) -> "Hardware":
        """A built-in machine by name, or a file. Raises ConfigError for what is neither or says nonsense."""
        path = Path(name_or_path)
        if not path.suffix:
            path = BUILT_IN / f"{name_or_path}.yaml"
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            known = ", ".join(sorted(file.stem for file in BUILT_IN.glob("*.yaml")))
            raise ConfigError(
                f"hardware '{name_or_path}' cannot be read ({said(error)}); give a file of `helios profile`, or one of "
                f"{known}"
            ) from None
        return cls.from_dict(content, str(path))

    @classmethod
    def from_dict(cls, content: Any, where: str) -> "Hardware":
        """Raises ConfigError naming the key, its value and what is expected."""
        given = _Given(content, where)
        made = cls(
            name=given.text("name"),
            description=given.text("description"),
            device=_processor(given.part("device")),
            device_bytes=int(given.number("device_bytes")),
            host=_processor(given.part("host")) if given.has("host") else None,
            host_bytes=int(given.number("host_bytes", 0.0)),
            disk_bytes=int(given.number("disk_bytes", 0.0)),
            disk_read=given.number("disk_read", 0.0),
            disk_write=given.number("disk_write", 0.0),
            disk_latency_s=given.number("disk_latency_s", 0.0),
            disk_piece_s=given.number("disk_piece_s", 0.0),
            to_device=given.number("to_device", 0.0),
            to_host=given.number("to_host", 0.0),
            read_cpu_s=given.number("read_cpu_s", 0.0),
            identity=given.texts("identity"),
            sources=given.texts("sources"),
        )
        given.refuse_others()
        if made.host is not None and not (made.to_device > 0 and made.to_host > 0 and made.host_bytes > 0):
            raise ConfigError(f"{where}: a machine with a host beside its device needs host_bytes, to_device, to_host")
        if made.disk_bytes and not (made.disk_read > 0 and made.disk_write > 0):
            raise ConfigError(f"{where}: a machine with a disk needs disk_read and disk_write")
        return made

    def to_dict(self) -> dict[str, Any]:
        """As ``from_dict`` reads it."""
        content: dict[str, Any] = {"name": self.name, "description": self.description}
        content |= {"device_bytes": self.device_bytes, "device": _processor_dict(self.device)}
        if self.host is not None:
            content |= {"host_bytes": self.host_bytes, "host": _processor_dict(self.host)}
        for name in REST:
            if getattr(self, name):
                content[name] = getattr(self, name)
        for name in ("identity", "sources"):
            if getattr(self, name):
                content[name] = dict(getattr(self, name))
        return content

    def save(self, path: Path) -> None:
        """Write the file. Raises ConfigError if it cannot be written."""
        write_whole(path, yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))


def bounds(key: str) -> tuple[float, float]:
    """The least and the most that a figure may be: seconds, ratios, or rates and bytes."""
    if key.endswith("_s") and not key.endswith(("bytes_s", "elements_s")):
        return 1e-15, 1e4
    return (1e-6, 1e6) if key.startswith(("small", "as_read")) else (1.0, 1e24)


class _Given:
    """A mapping of a file, whose keys are asked for one by one."""

    def __init__(self, content: Any, where: str) -> None:
        if not isinstance(content, Mapping):
            raise ConfigError(f"{where} is {content!r}; it must be a mapping of keys to figures")
        self._content = dict(content)
        self.where = where

    def has(self, key: str) -> bool:
        return key in self._content

    def take(self, key: str) -> Any:
        if key not in self._content:
            raise ConfigError(f"{self.where} lacks '{key}'")
        return self._content.pop(key)

    def text(self, key: str) -> str:
        value = self.take(key)
        if not isinstance(value, str):
            raise ConfigError(f"{self.where}: {key} is {value!r}; it must be text")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        if default is not None and not self.has(key):
            return default
        return self.positive(key, self.take(key), zero=default is not None)

    def positive(self, key: str, value: Any, zero: bool = False) -> float:
        least, most = bounds(key)
        if not is_number(value) or not (least <= value <= most or (value == 0 and zero)):
            raise ConfigError(
                f"{self.where}: {key} is {shown(value)}; it must be a number from {least:g} to {most:g}, written like "
                "1.5e+9"
            )
        return float(value)

    def part(self, key: str) -> "_Given":
        return _Given(self.take(key), f"{self.where}: {key}")

    def texts(self, key: str) -> dict[str, str]:
        value = self._content.pop(key, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}: {key} is {value!r}; it must be a mapping of names to text")
        return {str(name): str(text) for name, text in value.items()}

    def curve(self, key: str) -> Curve:
        value = self.take(key)
        if isinstance(value, (int, float)):
            return Curve(((1.0, self.positive(key, value)),))
        if not isinstance(value, Mapping) or not value:
            raise ConfigError(f"{self.where}: {key} is {value!r}; it must be a rate, or a mapping of sizes to rates")
        points = [(self.positive(key, size), self.positive(f"{key} at {size}", rate)) for size, rate in value.items()]
        return Curve(tuple(sorted(points)))

    def keys(self) -> list[str]:
        return list(self._content)

    def refuse_others(self) -> None:
        if self._content:
            raise ConfigError(f"{self.where} has '{next(iter(self._content))}', which is no key of a hardware file")


def _processor(given: _Given) -> Processor:
    products = given.part("products")
    kinds = products.keys()
    unknown = sorted(str(kind) for kind in set(kinds) - set(PRODUCTS))
    if unknown or not kinds:
        raise ConfigError(
            f"{products.where} are of {', '.join(unknown) or 'nothing'}; they must be of some of {', '.join(PRODUCTS)}"
        )
    made = Processor(
        products={kind: products.curve(kind) for kind in kinds},
        decode_attention=given.curve("decode_attention"),
        chunk_attention=given.curve("chunk_attention"),
        memory_bytes_s=given.number("memory_bytes_s"),
        expand_elements_s=given.number("expand_elements_s"),
        layer_s=given.number("layer_s", 0.0),
        sweep_s=given.number("sweep_s", 0.0),
        row_s=given.number("row_s", 0.0),
        as_read=given.curve("as_read") if given.has("as_read") else SAME,
        small=given.curve("small") if given.has("small") else SAME,
    )
    given.refuse_others()
    return made


def _figures(path: str, processor: Processor) -> dict[str, float | Curve]:
    found: dict[str, float | Curve] = {f"{path}.products.{kind}": curve for kind, curve in processor.products.items()}
    found[f"{path}.decode_attention"] = processor.decode_attention
    found[f"{path}.chunk_attention"] = processor.chunk_attention
    for name in ("as_read", "small"):
        if getattr(processor, name) != SAME:
            found[f"{path}.{name}"] = getattr(processor, name)
    return found | {f"{path}.{name}": getattr(processor, name) for name in RATES}


def _processor_dict(processor: Processor) -> dict[str, Any]:
    content: dict[str, Any] = {"products": {kind: _curve_dict(curve) for kind, curve in processor.products.items()}}
    content["decode_attention"] = _curve_dict(processor.decode_attention)
    content["chunk_attention"] = _curve_dict(processor.chunk_attention)
    for name in ("as_read", "small"):
        if getattr(processor, name) != SAME:
            content[name] = _curve_dict(getattr(processor, name))
    for name in RATES:
        content[name] = getattr(processor, name)
    return content


def _curve_dict(curve: Curve) -> Any:
    return curve.points[0][1] if len(curve.points) == 1 else {cast(Any, _plain(x)): y for x, y in curve.points}


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number
