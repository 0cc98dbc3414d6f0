"""EngineConfig: how one model is run. The one definition of each default; YAML, flags and Python all end here."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from types import NoneType
from typing import Literal, get_args

from .errors import ConfigError, shown
from .numbers import is_number

DTYPES = ("auto", "bfloat16", "float16", "float32")
CONFIDENCES = ("top1", "margin")
TILE_ROWS = 1024
TierName = Literal["device", "host", "disk"]
Schedule = Literal["continuous", "zigzag", "diagonal"]
TIERS: tuple[TierName, ...] = get_args(TierName)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to run one model. Values are checked by ``validate``, not at construction."""

    model: str
    """A name in the model store (``helios models list``) or a Hugging Face directory."""
    plan: str | None = None
    """A file that ``helios plan`` wrote, or "auto": plan when the model is loaded, for max_sequences requests of the
    whole context, a quarter of it generated, on this machine as ``helios profile`` measured it. What a plan decides
    holds where this configuration leaves a default; None leaves it to the simple rules that those defaults describe."""
    depth: int | None = None
    """Run only so many layers and the head of the exit there; None is all of them."""
    keep_states: bool = False
    """At an exit, keep the states of all positions, so that a deeper model goes on from them: ``Engine.change_depth``
    then runs the layers that are new alone; without, sequences are prefilled again."""
    exits: str | None = None
    """A file of exits' heads; "shared" where the model was trained to share its LM head with every layer; None is
    exits.safetensors beside the model, if it is there."""
    score_exits: bool = False
    """Serve at full depth, and count what every exit would have said: ``Engine.exit_profile``."""
    early_exit: bool = False
    """Keep all layers, and let each token leave at the first exit that is sure enough (EE-LLM). A request may then ask
    for a depth or a threshold of its own."""
    exit_threshold: float | None = None
    """Confidence from which on a token may leave; None is what each exit was calibrated to."""
    confidence: str = "top1"
    """How sure an exit is: "top1", the largest probability; "margin", that less the second largest."""
    check_vocabulary: int | None = None
    """Tokens, the most frequent ones, that an exit's confidence is looked for among; the whole LM head is then used for
    the token that leaves alone. None is the whole vocabulary."""
    draft_depth: int | None = None
    """Draft tokens at this exit and let the deeper layers, wherever they are, verify several at once: the output is the
    whole model's."""
    draft_tokens: int = 4
    """Tokens of a draft."""
    device: str = "auto"
    """"auto" takes CUDA where there is one; else "cpu", "cuda" or "cuda:N"."""
    dtype: str = "auto"
    """"auto" is bfloat16 where the device multiplies it fast, else float32."""
    memory_bytes: int | None = None
    """Limit on weights, KV cache, workspaces and buffers on the device; None takes what the machine can spare. Weights
    that do not fit are read from disk in every sweep."""
    host_bytes: int | None = None
    """Likewise on the host. None is what the machine can spare beside a GPU, and nothing where the CPU is the device:
    its memory is the device's then."""
    weights: Mapping[TierName, Sequence[str]] | None = None
    """Units of the model for each of "device", "host" and "disk": "embedding", "head", "layers.0-11", "layers.3.mlp".
    None keeps as much on the device as fits and reads the rest from disk."""
    read_ahead: bool = True
    """Read weights and KV while others compute. False is for measuring what that is worth."""
    kv_tokens: int | None = None
    """Positions the KV cache holds on the device, over all sequences; None is room for max_sequences of 1024 positions
    or one whole context, whichever is more, cut to what the memory allows; or none, if other tiers are to hold KV."""
    kv_host_tokens: int = 0
    """Likewise on the host, for sequences that the device has no room for."""
    kv_disk_tokens: int = 0
    """Likewise on disk, for sequences that the others have no room for."""
    kv_dtype: str = "auto"
    """"auto" is the compute dtype; "int4" stores K and V in 4 bits, in groups of up to 64 along the head."""
    value_share: float = 1.0
    """Share of the positions whose V is fetched in decode, those with the largest attention weights; 1 is exact."""
    delegate: bool = True
    """Attend to KV on the host there, instead of bringing it to the device."""
    disk_bytes: int | None = None
    """Limit on the KV and activations on disk; None is what the file system has free."""
    offload_dir: str | None = None
    """Directory for KV and activations on disk; None is "offload" in the folder of the model store."""
    context: int | None = None
    """Longest sequence admitted, prompt and output together; None is the model's own limit."""
    max_sequences: int = 32
    """Sequences in one sweep at most."""
    max_queued: int = 256
    """Requests that may wait; one more is refused with OverloadedError."""
    prefill_rows: int = 512
    """Prompt positions in one sweep at most; a longer prompt is prefilled in chunks."""
    tile_rows: int = TILE_ROWS
    """Rows that go through a layer together at most; more of a sweep take turns, which bounds the workspace."""
    activation_rows: int | None = None
    """Rows of a sweep whose hidden states stay on the device between layers; None is all of them."""
    activation_host_rows: int = 0
    """Further rows whose hidden states are kept on the host, tile by tile."""
    activation_disk_rows: int = 0
    """Further rows whose hidden states are kept on disk."""
    schedule: Schedule = "continuous"
    """Which waiting requests join the running ones. "continuous": every one for which there is room. "zigzag": a block
    of max_sequences together, and the next block when all of it is done. "diagonal": a few in every sweep, so that the
    running ones stand at evenly spread positions and their KV takes half of what the last tokens would need."""
    threads: int | None = None
    """Compute threads on a CPU; None is one for each core this process may use."""

    def validate(self) -> "EngineConfig":
        """Return self; raises ConfigError naming the field, its value and what is allowed."""
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {shown(self.dtype)}; it must be one of {', '.join(DTYPES)}")
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device is '{self.device}'; it must be auto, cpu, cuda or cuda:N")
        for name in ("max_sequences", "prefill_rows", "tile_rows", "draft_tokens"):
            _at_least(name, getattr(self, name), 1)
        for name in (
            "max_queued",
            "kv_host_tokens",
            "kv_disk_tokens",
            "activation_host_rows",
            "activation_disk_rows",
        ):
            _at_least(name, getattr(self, name), 0)
        if self.activation_rows is not None:
            _at_least("activation_rows", self.activation_rows, 0)
        elif self.activation_host_rows or self.activation_disk_rows:
            raise ConfigError("activation_host_rows or activation_disk_rows is set, and activation_rows is not: set it")
        for name in ("plan", "exits"):
            if not isinstance(getattr(self, name), (str, PathLike, NoneType)):
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; it must be the name of a file")
        if self.kv_dtype not in ("auto", "int4"):
            raise ConfigError(f"kv_dtype is '{self.kv_dtype}'; it must be auto or int4")
        if not is_number(self.value_share) or not 0 < self.value_share <= 1:
            raise ConfigError(f"value_share is {self.value_share!r}; it must be a number above 0 and at most 1")
        if self.confidence not in CONFIDENCES:
            raise ConfigError(f"confidence is {shown(self.confidence)}; it must be one of {', '.join(CONFIDENCES)}")
        threshold = self.exit_threshold
        if threshold is not None and not (is_number(threshold) and 0 <= threshold <= 1):
            raise ConfigError(f"exit_threshold is {shown(threshold)}; it must be a number from 0 to 1")
        for name in ("read_ahead", "delegate", "score_exits", "early_exit", "keep_states"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        if self.schedule not in get_args(Schedule):
            raise ConfigError(f"schedule is '{self.schedule}'; it must be one of {', '.join(get_args(Schedule))}")
        if self.weights is not None:
            _check_units(self.weights)
        if self.kv_tokens is not None:
            _at_least("kv_tokens", self.kv_tokens, 0 if self.kv_host_tokens or self.kv_disk_tokens else 1)
        for name in (
            "memory_bytes",
            "host_bytes",
            "disk_bytes",
            "context",
            "depth",
            "draft_depth",
            "check_vocabulary",
            "threads",
        ):
            value = getattr(self, name)
            if value is not None:
                _at_least(name, value, 1)
        return self


def _check_units(weights: object) -> None:
    if not isinstance(weights, Mapping):
        raise ConfigError(f"weights is {shown(weights)}; it must give units to tiers, as in {{disk: [layers.0-11]}}")
    for tier, names in weights.items():
        if tier not in TIERS:
            raise ConfigError(f"weights: {shown(tier)} is no tier; there are {', '.join(TIERS)}")
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"weights: {tier} is {shown(names)}; it must be a list as [embedding, layers.0-11]")


def _at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    if value < least:
        raise ConfigError(f"{name} is {value}; it must be at least {least}")


def parse_bytes(text: str | int) -> int:
    """Bytes from "2GiB", "500 MB", "1.5G" or a plain number. Raises ConfigError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(text), re.IGNORECASE)
    if not match:
        raise ConfigError(f"'{text}' is not a size; write it as 2GiB, 500MB or a number of bytes")
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


def format_bytes(count: float) -> str:
    """A size a person reads at a glance: "1.50 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
