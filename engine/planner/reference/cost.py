"""The paper's cost model (FlexGen, section 4.3 and its appendix): seconds of a layer, and bytes on each tier.

Every formula is written once. For a fixed block shape all are linear in the nine fractions, so they take fractions of
floats (``evaluate``), arrays of floats (the search's coefficients), or cvxpy variables alike. Where the paper is
silent, a docstring says what was decided.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic

from ...config import TIERS, TierName
from .model import PAPER, Amount, Fractions, Job, Options, PaperHardware, PaperModel, Phase, Policy, check_count

PHASES: tuple[Phase, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the schedule: ``n_batches`` batches of ``gbs`` sequences of a job, in a model on a machine."""

    model: PaperModel
    hardware: PaperHardware
    job: Job
    gbs: int
    n_batches: int
    options: Options = PAPER

    def __post_init__(self) -> None:
        check_count("gbs", self.gbs, "the sequences of a GPU batch")
        check_count("n_batches", self.n_batches, "the GPU batches of a block")

    @property
    def size(self) -> int:
        """Sequences (the paper's bls)."""
        return self.gbs * self.n_batches

    @property
    def layer_bytes(self) -> float:
        """Weights of one layer, as they are stored and moved."""
        return self.model.layer_bytes * self.options.weight_factor

    @property
    def kv_bytes(self) -> float:
        """KV of one position of a sequence in one layer, as it is stored and moved."""
        return self.model.kv_bytes * self.options.kv_factor

    @property
    def context(self) -> int:
        """Positions of a sequence at its end, which is what room is kept for from the start."""
        return self.job.s + self.job.n

    def rows(self, phase: Phase) -> int:
        """Positions of a sequence that pass through a layer at once."""
        return self.job.s if phase == "prefill" else 1


@dataclass(frozen=True, slots=True)
class Terms(Generic[Amount]):
    """Seconds that a block takes each link and each processor in one layer."""

    ctog: Amount
    """Host to device."""
    gtoc: Amount
    """Device to host."""
    dtoc: Amount
    """Disk to host."""
    ctod: Amount
    """Host to disk."""
    gpu_comp: Amount
    cpu_comp: Amount

    def concurrent(self) -> dict[str, Any]:
        """The five terms that overlap. Device and host compute in turn: the host attends between two products."""
        gpu: Any = self.gpu_comp
        return {
            "ctog": self.ctog,
            "gtoc": self.gtoc,
            "dtoc": self.dtoc,
            "ctod": self.ctod,
            "comp": gpu + self.cpu_comp,
        }

    def layer_times(self, overlap: bool) -> list[Any]:
        """What the layer's time is the largest of: the five terms, or their sum where nothing overlaps."""
        times = list(self.concurrent().values())
        return times if overlap else [sum(times)]


def prefill_terms(block: Block, f: Fractions[Any]) -> Terms[Any]:
    """One layer of prefill. Attention runs on the device, wherever the KV goes afterwards; as in the paper, the KV of
    s + 1 positions goes there."""
    model, machine, s = block.model, block.hardware, block.job.s
    weights = block.layer_bytes
    kv = block.size * (s + 1) * block.kv_bytes
    activations = block.size * s * model.activation_bytes
    products = block.size * s * _product_flops(model)
    attention = 4 * block.size * s**2 * model.h1
    return Terms(
        ctog=((f.wc + f.wd) * weights + (f.hc + f.hd) * activations) / machine.ctog_bdw,
        gtoc=(f.cc + f.cd) * kv / machine.gtoc_bdw_kv + (f.hc + f.hd) * activations / machine.gtoc_bdw_act,
        dtoc=(f.wd * weights + f.hd * activations) / machine.dtoc_bdw,
        ctod=f.cd * kv / machine.ctod_bdw_kv + f.hd * activations / machine.ctod_bdw,
        gpu_comp=products / machine.mm_flops_prefill + attention / machine.bmm_flops_prefill,
        cpu_comp=0.0,
    )


def decode_terms(block: Block, f: Fractions[Any]) -> Terms[Any]:
    """One layer of decode for the average token, which attends to s + n / 2 positions.

    Without delegation the KV off the device passes to it, and all attention is the device's; the one new position that
    goes back is not counted, as with delegation the query, key and value that go to the host are not.
    """
    model, machine = block.model, block.hardware
    weights = block.layer_bytes
    attended = block.size * (block.job.s + block.job.n / 2)
    kv = attended * block.kv_bytes
    new_kv = block.size * block.kv_bytes
    activations = block.size * model.activation_bytes
    attention = 4 * attended * model.h1
    to_device = (f.wc + f.wd) * weights + (f.hc + f.hd) * activations
    on_device, on_host = f.cg * attention, (f.cc + f.cd) * attention
    if not block.options.delegate:
        to_device = to_device + (f.cc + f.cd) * kv
        on_device, on_host = attention, 0.0
    return Terms(
        ctog=to_device / machine.ctog_bdw,
        gtoc=(f.hc + f.hd) * activations / machine.gtoc_bdw_act,
        dtoc=(f.cd * kv + f.wd * weights + f.hd * activations) / machine.dtoc_bdw,
        ctod=(f.cd * new_kv + f.hd * activations) / machine.ctod_bdw,
        gpu_comp=block.size * _product_flops(model) / machine.mm_flops_decode + on_device / machine.bmm_flops_decode,
        cpu_comp=on_host / machine.cpu_flops,
    )


def _product_flops(model: PaperModel) -> int:
    """FLOPs of one position's products with a layer's weights."""
    return 8 * model.h1**2 + 4 * model.h1 * model.h2


def terms(block: Block, f: Fractions[Any], phase: Phase) -> Terms[Any]:
    """``prefill_terms`` or ``decode_terms``."""
    return prefill_terms(block, f) if phase == "prefill" else decode_terms(block, f)


@dataclass(frozen=True, slots=True)
class Memory(Generic[Amount]):
    """Bytes on one tier in one phase. Weights, activations and KV are at home there; the others are work memory."""

    weights: Amount
    activations: Amount
    kv: Amount
    passing: Amount
    """Slots for what lives elsewhere and passes through."""
    workspaces: Mapping[str, Amount]
    """What each kind of operation holds while it runs; there is only one at a time."""

    def peaks(self) -> list[Any]:
        """What the tier's peak is the largest of: everything else, with the workspace of each kind of operation."""
        weights: Any = self.weights
        always = weights + self.activations + self.kv + self.passing
        return [always + workspace for workspace in self.workspaces.values()] or [always]


def memory(block: Block, f: Fractions[Any], phase: Phase) -> dict[TierName, Memory[Any]]:
    """Every tier in one phase, while a layer runs."""
    return {
        "device": _device_memory(block, f, phase),
        "host": _host_memory(block, f, phase),
        "disk": _home(block, phase, f.wd, f.cd, f.hd, 0.0, {}),
    }


def _home(
    block: Block, phase: Phase, w: Any, c: Any, h: Any, passing: Any, workspaces: Mapping[str, Any]
) -> Memory[Any]:
    """``w``, ``c``, ``h``: the tier's fractions. KV has room for whole sequences from the start, activations for the
    phase's rows."""
    layers = block.model.n_layers
    return Memory(
        weights=w * (block.layer_bytes * layers),
        activations=h * (block.size * block.rows(phase) * block.model.activation_bytes),
        kv=c * (block.size * block.context * block.kv_bytes * layers),
        passing=passing,
        workspaces=workspaces,
    )


def _device_memory(block: Block, f: Fractions[Any], phase: Phase) -> Memory[Any]:
    """Two slots for weights and one for a batch's activations, as in the paper; without delegation two for the KV of a
    batch as well, one read while the other is filled. A layer in codes is expanded in no extra memory, as the paper
    counts none."""
    rows = block.rows(phase)
    passing = 2 * (1 - f.wg) * block.layer_bytes + (1 - f.hg) * (block.gbs * rows * block.model.activation_bytes)
    if phase == "decode" and not block.options.delegate:
        passing = passing + 2 * (1 - f.cg) * (block.gbs * block.context * block.kv_bytes)
    return _home(block, phase, f.wg, f.cg, f.hg, passing, _device_workspaces(block, f, phase))


def _device_workspaces(block: Block, f: Fractions[Any], phase: Phase) -> dict[str, Any]:
    """Inputs and results of an operation on a batch, in fp16. Queries times keys take as much as scores times values,
    so both are "attention"; so with the two products of the MLP. Attention that is delegated takes none here."""
    gbs, h1, h2, rows = block.gbs, block.model.h1, block.model.h2, block.rows(phase)
    keys = block.job.s if phase == "prefill" else block.context
    share = f.cg if phase == "decode" and block.options.delegate else 1.0
    return {
        "qkv": 8 * gbs * rows * h1,
        "attention": share * (2 * gbs * (rows * h1 + keys * h1 + block.model.n_heads * rows * keys)),
        "embedding": 4 * gbs * rows * h1,
        "mlp": 2 * gbs * rows * (h1 + h2),
    }


def _host_memory(block: Block, f: Fractions[Any], phase: Phase) -> Memory[Any]:
    """One slot each for the layer, the activations and the KV of a batch on their way from or to disk. Delegated
    attention holds the scores, the query and the result of a batch: of the share that is delegated, as on the device.
    """
    rows, gbs = block.rows(phase), block.gbs
    passing = (
        f.wd * block.layer_bytes
        + f.hd * (gbs * rows * block.model.activation_bytes)
        + f.cd * (gbs * block.context * block.kv_bytes)
    )
    workspaces: dict[str, Any] = {}
    if phase == "decode" and block.options.delegate:
        attention = 2 * block.model.n_heads * block.context + 4 * block.model.h1
        workspaces["attention"] = (f.cc + f.cd) * (gbs * attention)
    return _home(block, phase, f.wc, f.cc, f.hc, passing, workspaces)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a policy takes, by the formulas."""

    prefill: Terms[float]
    """Of one layer."""
    decode: Terms[float]
    """Of one layer and the average token."""
    prefill_layer_s: float
    """Tpre."""
    decode_layer_s: float
    """Tgen."""
    latency_s: float
    """T: seconds until the whole block is done."""
    throughput: float
    """Generated tokens a second, prefill included."""
    decode_throughput: float
    """Generated tokens a second, of decode alone."""
    memory: Mapping[Phase, Mapping[TierName, Memory[float]]]

    def peak_bytes(self, tier: TierName) -> float:
        """The most that is held on a tier at any time."""
        return float(max(max(self.memory[phase][tier].peaks()) for phase in PHASES))

    def overfull(self, hardware: PaperHardware) -> list[TierName]:
        """Tiers that cannot hold what the policy puts there."""
        return [tier for tier in TIERS if self.peak_bytes(tier) > hardware.capacity(tier)]


def evaluate(model: PaperModel, hardware: PaperHardware, job: Job, policy: Policy, options: Options = PAPER) -> Cost:
    """The cost of a policy, whether it fits or not (``Cost.overfull``)."""
    block = Block(model, hardware, job, policy.gbs, policy.n_batches, options)
    prefill, decode = (terms(block, policy.fractions, phase) for phase in PHASES)
    prefill_layer_s, decode_layer_s = (max(phase.layer_times(options.overlap)) for phase in (prefill, decode))
    latency_s = (prefill_layer_s + decode_layer_s * (job.n - 1)) * model.n_layers
    return Cost(
        prefill=prefill,
        decode=decode,
        prefill_layer_s=prefill_layer_s,
        decode_layer_s=decode_layer_s,
        latency_s=latency_s,
        throughput=block.size * job.n / latency_s,
        decode_throughput=block.size / (decode_layer_s * model.n_layers),
        memory={phase: memory(block, policy.fractions, phase) for phase in PHASES},
    )
