"""A plan: how one model is run on one machine for one kind of job, and what is expected of it. Saved as YAML."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from ..config import EngineConfig, TierName, parse_bytes
from ..errors import ConfigError, said, shown
from ..files import write_whole
from .job import Job
from .places import count_units

VERSION = 1
_KINDS: dict[type, str] = {str: "text", Mapping: "a mapping of keys"}
_DEFAULT = EngineConfig(model="")
SETTINGS = (
    "memory_bytes",
    "host_bytes",
    "disk_bytes",
    "dtype",
    "depth",
    "context",
    "max_sequences",
    "prefill_rows",
    "weights",
    "kv_tokens",
    "kv_host_tokens",
    "kv_disk_tokens",
    "kv_dtype",
    "value_share",
    "delegate",
    "schedule",
    "tile_rows",
    "activation_rows",
    "activation_host_rows",
    "activation_disk_rows",
)
"""Fields of EngineConfig that a plan decides."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a simulated run of the job took. Seconds, and tokens a second."""

    prefill_s: float
    decode_s: float
    throughput: float
    decode_throughput: float
    latency_s: float
    """Until the last token of a block."""
    bound: str
    """The resource that was busy longest, and for what part of the time."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Share of the time in which each resource was busy."""
    memory: Mapping[TierName, Mapping[str, int]] = field(default_factory=dict)
    """Bytes on each tier by use, with the tier's "capacity"."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A plan that lost, and why."""

    summary: str
    throughput: float
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """``settings`` are the fields of EngineConfig that it decides."""

    model: str
    hardware: str
    job: Job
    settings: Mapping[str, Any]
    prediction: Prediction | None = None
    rejected: tuple[Rejected, ...] = ()
    tried: int = 0
    """Options that were solved for."""
    quantize: int | None = None
    """Bits of the copy that it is for; None if it is for the model as it is."""

    @classmethod
    def of(cls, config: EngineConfig, hardware: str, job: Job) -> "Plan":
        """A configuration as a plan."""
        default = EngineConfig(model=config.model)
        changed = {name: getattr(config, name) for name in SETTINGS if getattr(config, name) != getattr(default, name)}
        return cls(config.model, hardware, job, changed)

    def config(self, base: EngineConfig | None = None) -> EngineConfig:
        """The configuration that runs it; everything that a plan does not decide is ``base``'s."""
        return replace(base or EngineConfig(model=self.model), **self.settings)

    def to_dict(self) -> dict[str, Any]:
        """As ``from_dict`` reads it, and as ``--json`` prints it."""
        content: dict[str, Any] = {"helios_plan": VERSION, "model": self.model, "hardware": self.hardware}
        content |= {"job": asdict(self.job), "settings": _plain(self.settings)}
        if self.quantize:
            content["quantize"] = self.quantize
        if self.prediction:
            content["prediction"] = _plain(asdict(self.prediction))
        if self.rejected:
            content |= {"tried": self.tried, "rejected": [asdict(lost) for lost in self.rejected]}
        return content

    @classmethod
    def from_dict(cls, content: Any, where: str) -> "Plan":
        """The plan's decisions; what it predicted is not read again, since it may have been edited.

        Raises ConfigError naming the key, its value and what is expected.
        """
        if not isinstance(content, Mapping) or content.get("helios_plan") is not VERSION:
            raise ConfigError(f"{where} is no plan of version {VERSION}; `helios plan MODEL -o FILE` writes one")
        for key, kind in (("model", str), ("hardware", str), ("job", Mapping), ("settings", Mapping)):
            if not isinstance(content.get(key), kind):
                raise ConfigError(f"{where}: {key} is {shown(content.get(key))}; a plan needs it as {_KINDS[kind]}")
        for part, names in (("settings", SETTINGS), ("job", tuple(given.name for given in fields(Job)))):
            for name in content[part]:
                if name not in names:
                    raise ConfigError(f"{where}: {part} has {shown(name)}; it may have {', '.join(names)}")
        try:
            job = Job(**content["job"])
        except TypeError:
            raise ConfigError(f"{where}: job is {shown(content['job'])}; it needs prompt_len and gen_len") from None
        bits = content.get("quantize")
        if bits not in (None, 4, 8) or isinstance(bits, bool):
            raise ConfigError(f"{where}: quantize is {bits!r}; it must be 4 or 8, or left out")
        plan = cls(content["model"], content["hardware"], job, {}, quantize=bits)
        try:
            settings = {name: _size(name, value) for name, value in content["settings"].items()}
            plan = replace(plan, settings=settings)
            plan.config().validate()
        except ConfigError as error:
            raise ConfigError(f"{where}: settings: {error}") from None
        return plan

    def save(self, path: Path) -> None:
        """Write the file. Raises ConfigError if it cannot be written."""
        write_whole(path, yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))

    @classmethod
    def load(cls, path: Path) -> "Plan":
        """Raises ConfigError if it cannot be read, and as ``from_dict``."""
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise ConfigError(
                f"the plan {path} cannot be read ({said(error)}); `helios plan MODEL -o FILE` writes one"
            ) from None
        return cls.from_dict(content, str(path))

    def summary(self) -> str:
        """In a line."""
        given = self.settings
        kv = {"device": given.get("kv_tokens") or 0, "host": given.get("kv_host_tokens", 0)}
        kv["disk"] = given.get("kv_disk_tokens", 0)
        places = "+".join(tier for tier, count in kv.items() if count) or "device"
        away = {
            tier: count_units(names)
            for tier, names in (given.get("weights") or {}).items()
            if tier != "device" and names
        }
        weights = ", ".join(f"{count} units on {tier}" for tier, count in away.items()) or "all weights on the device"
        extra = "".join(f", {text}" for text in _extras(given))
        return f"{given.get('max_sequences', 1)} sequences, {weights}, KV on {places}{extra}"


def _size(name: str, value: Any) -> Any:
    """Bytes, which may be written as text: "2GiB"."""
    return parse_bytes(value) if name.endswith("_bytes") and isinstance(value, str) else value


def _extras(given: Mapping[str, Any]) -> list[str]:
    extras = [f"{given.get('prefill_rows', _DEFAULT.prefill_rows)} prompt rows a sweep"]
    if given.get("schedule", "continuous") != "continuous":
        extras.append(str(given["schedule"]))
    if given.get("kv_dtype") == "int4":
        extras.append("KV in 4 bits")
    if given.get("kv_host_tokens") and not given.get("delegate", True):
        extras.append("attention not delegated")
    return extras


def _plain(value: Any) -> Any:
    """Mappings and sequences as YAML and JSON know them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value
