"""What the paper's planner plans for, and with: a model, a machine, a job, a policy. Plain data, checked when made."""

from dataclasses import dataclass, fields
from typing import Generic, Literal, TypeVar

from ...config import TierName
from ...errors import ConfigError, UnsupportedModelError
from ...numbers import is_number
from ...quant.scheme import GROUP_SIZE, SCALE_BYTES
from ...spec import ModelSpec

Phase = Literal["prefill", "decode"]
Amount = TypeVar("Amount")
"""What the formulas calculate with: a float, an array of floats, or a cvxpy expression."""

GB = 2**30
MOST = 1e24
"""No figure of a machine is above it."""
TERA = 10**12
COMPRESSED = (4 + 2 * 8 * SCALE_BYTES / GROUP_SIZE) / 16
"""Bytes of 4-bit codes, with a scale and a minimum for each group, to those of fp16 (section 5): 4.5 / 16."""
TOLERANCE = 1e-6
"""By which the fractions of a tensor class may miss 1."""


def check_count(name: str, value: object, what: str) -> None:
    """Raises ConfigError for what is no positive whole number; ``what`` says what to give instead."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1: give {what}")


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A decoder as the paper's formulas see it: multi-head attention, two MLP matrices, fp16, nothing but layers."""

    name: str
    n_layers: int
    h1: int
    """Hidden size."""
    h2: int
    """MLP size."""
    n_heads: int

    def __post_init__(self) -> None:
        for name in ("n_layers", "h1", "h2", "n_heads"):
            check_count(name, getattr(self, name), "the size in the model's config")

    @property
    def layer_bytes(self) -> int:
        """Weights of one layer in fp16: query, key, value and output matrices, and the MLP's two."""
        return 8 * self.h1**2 + 4 * self.h1 * self.h2

    @property
    def kv_bytes(self) -> int:
        """KV of one position in one layer, in fp16."""
        return 4 * self.h1

    @property
    def activation_bytes(self) -> int:
        """Hidden state of one position, in fp16."""
        return 2 * self.h1

    @classmethod
    def from_spec(cls, spec: ModelSpec, name: str | None = None) -> "PaperModel":
        """The shapes of a checkpoint. Raises UnsupportedModelError naming all that the paper's formulas leave out."""
        misfits = []
        if spec.n_kv_heads != spec.n_heads:
            misfits.append(f"{spec.n_kv_heads} KV heads for {spec.n_heads} query heads")
        if spec.gated_mlp:
            misfits.append("a gated MLP")
        if spec.q_size != spec.hidden_size:
            misfits.append(f"heads of {spec.q_size} elements in all on a hidden size of {spec.hidden_size}")
        if any(window is not None for window in spec.windows):
            misfits.append("sliding windows")
        if misfits:
            raise UnsupportedModelError(
                f"the paper's formulas are for multi-head attention and an MLP of two matrices; this "
                f"'{spec.architecture}' model has {', '.join(misfits)}. Give a model like OPT"
            )
        return cls(name or spec.architecture, spec.n_layers, spec.hidden_size, spec.mlp_size, spec.n_heads)


OPT_1_3B = PaperModel("OPT-1.3B", 24, 2048, 8192, 32)
OPT_2_7B = PaperModel("OPT-2.7B", 32, 2560, 10240, 32)
OPT_6_7B = PaperModel("OPT-6.7B", 32, 4096, 16384, 32)
OPT_13B = PaperModel("OPT-13B", 40, 5120, 20480, 40)
OPT_30B = PaperModel("OPT-30B", 48, 7168, 28672, 56)
OPT_66B = PaperModel("OPT-66B", 64, 9216, 36864, 72)
OPT_175B = PaperModel("OPT-175B", 96, 12288, 49152, 96)


@dataclass(frozen=True, slots=True)
class PaperHardware:
    """A machine with one GPU, as constants: bandwidths in bytes a second, rates in FLOP/s. Where there are two of one
    kind, each says which terms it is of."""

    name: str
    ctog_bdw: float
    """Host to device, whatever is moved."""
    gtoc_bdw_kv: float
    """Device to host: the KV that prefill makes."""
    gtoc_bdw_act: float
    """Device to host: activations, in both phases."""
    dtoc_bdw: float
    """Disk to host, whatever is moved."""
    ctod_bdw_kv: float
    """Host to disk: the KV that prefill makes."""
    ctod_bdw: float
    """Host to disk: activations in both phases, and the KV of decode, of which there is a position at a time."""
    mm_flops_prefill: float
    """Products with weights."""
    mm_flops_decode: float
    bmm_flops_prefill: float
    """Attention on the device."""
    bmm_flops_decode: float
    cpu_flops: float
    """Attention on the host, in decode."""
    device_bytes: float
    host_bytes: float
    disk_bytes: float
    """0 without a disk."""

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            absent = value == 0 and field.name.endswith("bytes")
            if not is_number(value) or not (absent or 1e-3 < value < MOST):
                raise ConfigError(
                    f"{field.name} of '{self.name}' is {value!r}; it must be a number above 0 and below "
                    f"{MOST:g} (a memory's may be 0): give what was measured, in bytes, bytes a second or FLOP/s"
                )

    def capacity(self, tier: TierName) -> float:
        """Bytes of a tier."""
        return {"device": self.device_bytes, "host": self.host_bytes, "disk": self.disk_bytes}[tier]


T4 = PaperHardware(
    name="NVIDIA T4, 208 GB of RAM, 1.5 TB NVMe",
    ctog_bdw=12.89 * GB,
    gtoc_bdw_kv=0.97 * GB,
    gtoc_bdw_act=4.82 * GB,
    dtoc_bdw=0.473 * GB,
    ctod_bdw_kv=0.746 * GB,
    ctod_bdw=2.015 * GB,
    mm_flops_prefill=21.24 * TERA,
    mm_flops_decode=4.3 * TERA,
    bmm_flops_prefill=9.97 * TERA,
    bmm_flops_decode=0.079 * TERA,
    cpu_flops=0.0123 * TERA,
    device_bytes=16 * GB,
    host_bytes=208 * GB,
    disk_bytes=1500 * GB,
)
"""The paper's machine, with the constants its authors fitted to their own runs. Their script lets nothing overlap with
``ctog`` in decode, the paper's formula everything: with the latter, what waits for the host is predicted too fast."""


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts of ``s`` tokens, to each of which ``n`` tokens are generated."""

    s: int
    n: int

    def __post_init__(self) -> None:
        check_count("s", self.s, "the prompts' length in tokens")
        check_count("n", self.n, "the tokens to generate for each prompt")


@dataclass(frozen=True, slots=True)
class Options:
    """How the runtime works. The defaults are the paper's."""

    compress_weights: bool = False
    """Weights in 4 bits. It changes bytes alone: expanding is free, as the paper's cost model has no term for it."""
    compress_kv: bool = False
    """KV in 4 bits, likewise."""
    delegate: bool = True
    """Decode attention to KV off the device runs on the host; or else that KV passes to the device."""
    overlap: bool = True
    """Links and processors work at the same time; or else one after another."""

    @property
    def weight_factor(self) -> float:
        """Bytes of stored weights to those in fp16."""
        return COMPRESSED if self.compress_weights else 1.0

    @property
    def kv_factor(self) -> float:
        """Bytes of stored KV to those in fp16."""
        return COMPRESSED if self.compress_kv else 1.0


PAPER = Options()


@dataclass(frozen=True, slots=True)
class Fractions(Generic[Amount]):
    """What part of the weights (w), the KV cache (c) and the activations (h) is on the device (g), the host (c) and the
    disk (d)."""

    wg: Amount
    wc: Amount
    wd: Amount
    cg: Amount
    cc: Amount
    cd: Amount
    hg: Amount
    hc: Amount
    hd: Amount

    def triples(self) -> dict[str, tuple[Amount, Amount, Amount]]:
        """Device, host and disk of each tensor class; each triple sums to 1."""
        return {
            "weights": (self.wg, self.wc, self.wd),
            "KV cache": (self.cg, self.cc, self.cd),
            "activations": (self.hg, self.hc, self.hd),
        }


@dataclass(frozen=True, slots=True)
class Policy:
    """A block's shape, and where its tensors are."""

    gbs: int
    """Sequences of a GPU batch."""
    n_batches: int
    """GPU batches that go through a layer one after another before the next layer is loaded."""
    fractions: Fractions[float]

    def __post_init__(self) -> None:
        check_count("gbs", self.gbs, "the sequences of a GPU batch")
        check_count("n_batches", self.n_batches, "the GPU batches of a block")
        for name, triple in self.fractions.triples().items():
            within = all(-TOLERANCE <= part <= 1 + TOLERANCE for part in triple)
            if not (within and abs(sum(triple) - 1) <= TOLERANCE):
                raise ConfigError(
                    f"the fractions of the {name} are {triple}; each must be between 0 and 1, and their sum 1: give "
                    "the disk what device and host leave"
                )

    @property
    def block_size(self) -> int:
        """Sequences of a block (the paper's bls)."""
        return self.gbs * self.n_batches

    @classmethod
    def from_percent(cls, gbs: int, n_batches: int, *percent: float) -> "Policy":
        """As the paper writes a policy: ``percent`` is wg, wc, cg, cc, hg, hc, and the disk has the rest.

        Raises ConfigError if these are not six or leave less than nothing to the disk.
        """
        if len(percent) != 6:
            raise ConfigError(f"percent has {len(percent)} numbers; it must have 6: give wg, wc, cg, cc, hg and hc")
        wg, wc, cg, cc, hg, hc = percent
        all_nine = (wg, wc, 100 - wg - wc, cg, cc, 100 - cg - cc, hg, hc, 100 - hg - hc)
        return cls(gbs, n_batches, Fractions(*(part / 100 for part in all_nine)))
