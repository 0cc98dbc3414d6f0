"""The one configuration object: YAML files, command-line flags and Python mappings all become an ``AppConfig``.

Engine defaults are EngineConfig's own and are not restated here. Types are strict: "8000" is not a number. Errors
say where (the file and the key path), what was found and what is allowed.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from engine.config import EngineConfig, Schedule, TierName, parse_bytes
from engine.errors import ConfigError

_ENGINE = EngineConfig(model="")
Objective = Literal["throughput", "latency"]
Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(ge=1)]
AppName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


class ModelConfig(_Strict):
    """One model and how each of its replicas is run. What is not set here is as EngineConfig has it."""

    name: ModelName
    """What requests call the model."""
    path: str = ""
    """A name in the model store or a Hugging Face directory; ``name`` when not given. A path that begins with
    ``.`` or ``~``, or an existing directory, is made absolute, from the configuration file's directory."""
    plan: str | None = _ENGINE.plan
    """A file that ``helios plan`` wrote, made absolute from the configuration file's directory; or "auto"."""
    depth: int | None = _ENGINE.depth
    keep_states: bool = _ENGINE.keep_states
    exits: str | None = _ENGINE.exits
    """A file of heads, made absolute likewise; or "shared", or "shared:8,16"."""
    early_exit: bool = _ENGINE.early_exit
    exit_threshold: float | None = _ENGINE.exit_threshold
    confidence: str = _ENGINE.confidence
    check_vocabulary: int | None = _ENGINE.check_vocabulary
    draft_depth: int | None = _ENGINE.draft_depth
    draft_tokens: int = _ENGINE.draft_tokens
    device: str = _ENGINE.device
    dtype: str = _ENGINE.dtype
    memory: str | int | None = _ENGINE.memory_bytes
    """Limit on weights, KV cache and workspaces, as "2GiB" or a number of bytes."""
    host_memory: str | int | None = _ENGINE.host_bytes
    """Likewise on the host, beside a GPU or as a second tier."""
    disk_space: str | int | None = _ENGINE.disk_bytes
    """Limit on KV and activations on disk."""
    offload_dir: str | None = _ENGINE.offload_dir
    weights: dict[TierName, list[str]] | None = None
    """Units for each of device, host and disk; not given, what fits stays on the device and the rest on disk."""
    kv_tokens: int | None = _ENGINE.kv_tokens
    kv_host_tokens: int = _ENGINE.kv_host_tokens
    kv_disk_tokens: int = _ENGINE.kv_disk_tokens
    kv_dtype: str = _ENGINE.kv_dtype
    value_share: float = _ENGINE.value_share
    delegate: bool = _ENGINE.delegate
    read_ahead: bool = _ENGINE.read_ahead
    schedule: Schedule = _ENGINE.schedule
    tile_rows: int = _ENGINE.tile_rows
    activation_rows: int | None = _ENGINE.activation_rows
    activation_host_rows: int = _ENGINE.activation_host_rows
    activation_disk_rows: int = _ENGINE.activation_disk_rows
    context: int | None = _ENGINE.context
    max_sequences: int = _ENGINE.max_sequences
    max_queued: int = _ENGINE.max_queued
    prefill_rows: int = _ENGINE.prefill_rows
    threads: int | None = _ENGINE.threads
    replicas: Positive = 1
    """Actors that serve the model, each with its own weights."""
    num_gpus: Annotated[float, Field(ge=0)] | None = None
    """GPUs Ray reserves for each replica; None is 1 for a CUDA device (``auto`` included, where the cluster has
    GPUs) and 0 for the CPU."""

    @model_validator(mode="before")
    @classmethod
    def _path_is_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("path") is None and isinstance(data.get("name"), str):
            return {**data, "path": data["name"]}
        return data

    @field_validator("name")
    @classmethod
    def _not_auto(cls, name: str) -> str:
        if name == "auto":
            raise ValueError("that asks the router to choose and cannot be a model's name")
        return name

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str, info: ValidationInfo) -> str:
        """Actors run in other working directories, so a relative path must not reach them."""
        base = Path((info.context or {}).get("base", "."))
        place = base / Path(path).expanduser()
        if path.startswith((".", "~", "/")) or ("/" in path and place.is_dir()):
            return str(place.resolve())
        return path

    @field_validator("plan", "exits")
    @classmethod
    def _file_absolute(cls, file: str | None, info: ValidationInfo) -> str | None:
        word = {"plan": "auto", "exits": "shared"}[info.field_name or ""]
        if file is None or file == word or (word == "shared" and file.startswith(f"{word}:")):
            return file
        return str((Path((info.context or {}).get("base", ".")) / Path(file).expanduser()).resolve())

    @field_validator("memory", "host_memory", "disk_space", mode="before")
    @classmethod
    def _size(cls, size: Any) -> Any:
        try:
            if isinstance(size, bool) or parse_bytes("1" if size is None else size) < 1:
                raise ConfigError("no size")
        except ConfigError:
            raise ValueError("write it as 2GiB, 500MB or a number of bytes") from None
        return size

    @model_validator(mode="after")
    def _engine_accepts(self) -> Self:
        try:
            self.engine_config().validate()
        except ConfigError as error:  # pydantic gathers ValueErrors
            raise ValueError(str(error)) from None
        return self

    def engine_config(self) -> EngineConfig:
        """The engine's view of this model."""
        return EngineConfig(
            model=self.path,
            device=self.device,
            dtype=self.dtype,
            memory_bytes=_bytes(self.memory),
            host_bytes=_bytes(self.host_memory),
            disk_bytes=_bytes(self.disk_space),
            **{name: getattr(self, name) for name in _SAME},
        )

    def fingerprint(self) -> str:
        """Equal for two configurations exactly when an actor of one may serve as the other's (replicas aside)."""
        return hashlib.sha256(self.model_dump_json(exclude={"replicas"}).encode()).hexdigest()[:16]


class RouterConfig(_Strict):
    objective: Objective = "throughput"
    """What ``auto`` ranks models by: tokens per second, or time to first token."""


class HttpConfig(_Strict):
    host: str = "127.0.0.1"
    port: Port = 8000
    """0 takes a free port."""
    max_queued: Positive = 128
    """Requests waiting or running over all models; one more is answered 503."""
    max_body_bytes: Positive = 4 * 2**20
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0


class AppConfig(_Strict):
    """One app: its models, how its router chooses, and where it listens."""

    app: AppName = "helios"
    models: Annotated[list[ModelConfig], Field(min_length=1)]
    router: RouterConfig = RouterConfig()
    http: HttpConfig = HttpConfig()
    ray_address: str | None = None
    """A Ray cluster to join ("auto", "host:port"); None uses the one Helios started on this machine, or starts it."""

    @field_validator("models")
    @classmethod
    def _unique(cls, models: list[ModelConfig]) -> list[ModelConfig]:
        names = [model.name for model in models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"more than one model is named {', '.join(twice)}; give each its own name")
        return models


def _bytes(size: str | int | None) -> int | None:
    return None if size is None else parse_bytes(size)


_SAME = {field.name for field in fields(EngineConfig)} & set(ModelConfig.model_fields) - {"device", "dtype"}
"""What the engine's configuration calls by the same name and takes as it is."""


def model_config(model: str, settings: Mapping[str, Any]) -> ModelConfig:
    """One model with some of a configuration's keys. Raises ConfigError as ``load_config``."""
    return load_config(
        {"models": [{"name": Path(model).expanduser().resolve().name, "path": model, **settings}]}
    ).models[0]


_SECTIONS: Mapping[str, type[BaseModel]] = {"models": ModelConfig, "router": RouterConfig, "http": HttpConfig}


def load_config(source: str | Path | Mapping[str, Any]) -> AppConfig:
    """An ``AppConfig`` from a YAML file or a mapping of the same shape.

    Relative model paths are taken from the file's directory, or the working directory for a mapping.
    Raises ConfigError that lists every fault with its key path, the value and what is allowed.
    """
    if isinstance(source, Mapping):
        return _validated(source, base=Path(), origin="the configuration")
    path = Path(source).expanduser()
    return _validated(_read_yaml(path), base=path.parent, origin=str(path))


class _Loader(yaml.SafeLoader):
    """Refuses a key that comes twice; YAML does too, but the library takes the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem=f"'{key.value}' comes twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; name a YAML file with a list 'models'") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a directory; name a YAML file with a list 'models', or serve a model directory by --model"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}); it must be a YAML file in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name a YAML file with a list 'models'") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(data, Mapping):
        found = "nothing" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"{path} holds {found}; it must be a mapping with a list 'models'")
    return data


def _validated(data: Mapping[str, Any], base: Path, origin: str) -> AppConfig:
    try:
        return AppConfig.model_validate(dict(data), context={"base": base})
    except ValidationError as error:
        faults = [_describe(fault) for fault in error.errors(include_url=False)]
        raise ConfigError(f"{origin}: " + "; ".join(dict.fromkeys(faults))) from None


def _describe(fault: Mapping[str, Any]) -> str:
    """One fault in a sentence: ``models[0].replicas is 'two'; it must be a valid integer``."""
    where = _key_path(fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"{where} is not a known key; {_known_keys(fault['loc'])}"
    if fault["type"] == "missing":
        return f"{where} is missing"
    value = fault["input"]
    if fault["type"] == "value_error":
        text = str(fault["ctx"]["error"])
        return f"{where}: {text}" if isinstance(value, (dict, list)) else f"{where} is {_as_yaml(value)}; {text}"
    allowed = _ALLOWED.get(fault["type"]) or fault["msg"].removeprefix("Input should ")
    return f"{where} is {_as_yaml(value)}; it must {allowed}"


_ALLOWED: Mapping[str, str] = {
    "too_short": "have at least one entry",
    "string_pattern_mismatch": "be letters, digits, '.', '_' and '-' (in a model's name '/' too), the first no sign",
    "model_type": "be a mapping of keys to values",
    "list_type": "be a list",
}


def _as_yaml(value: Any) -> str:
    match value:
        case None | bool():
            return "null" if value is None else str(value).lower()
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case dict():
            return "a mapping"
    return repr(value)


def _key_path(loc: tuple[str | int, ...]) -> str:
    """``models[0].memory``. A union's branch ("str", "int") at the end is pydantic's own word and left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif path and part in ("str", "int", "float", "constrained-float"):
            continue
        else:
            path += f".{part}" if path else part
    return path or "the top level"


def _known_keys(loc: tuple[str | int, ...]) -> str:
    section = _SECTIONS.get(str(loc[0]), AppConfig) if len(loc) > 1 else AppConfig
    known = list(section.model_fields)
    close = get_close_matches(str(loc[-1]), known, n=1)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
