"""Figures of the FlexGen paper, as data: what it measured on a T4, and with which policies, to set predictions beside.

Throughputs are generated tokens a second with n = 32. What is in 4 bits (weights and KV, or KV alone) and the policies
of the ablations that change them are from the authors' benchmark scripts. With KV in 4 bits their runtime does not
delegate.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .cost import Cost, evaluate
from .model import OPT_6_7B, OPT_30B, OPT_175B, PAPER, T4, Job, Options, PaperHardware, PaperModel, Policy

N = 32
"""Tokens generated for each prompt, everywhere in the paper's throughput tables."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement of FlexGen's runtime."""

    label: str
    model: PaperModel
    s: int
    """Prompt length."""
    throughput: float
    """Measured, in tokens a second."""
    policy: Policy
    options: Options = PAPER

    @property
    def job(self) -> Job:
        return Job(self.s, N)


@dataclass(frozen=True, slots=True)
class Baseline:
    """One measurement of another system, or of FlexGen on several nodes."""

    system: str
    model: PaperModel
    throughput: float
    """In tokens a second, with prompts of 512 tokens."""
    decode_throughput: float | None = None
    """Of decode alone, where the paper has it."""


KV_4_BIT = Options(compress_kv=True, delegate=False)
ALL_4_BIT = replace(KV_4_BIT, compress_weights=True)
_ON_DEVICE = (100, 0, 100, 0, 100, 0)
_ON_HOST = (0, 100, 0, 100, 0, 100)
_HALF_ON_DISK = (0, 50, 0, 0, 0, 100)
"""Half of the weights and all KV, that is."""

TABLE = (
    Row("fp16", OPT_6_7B, 512, 25.26, Policy.from_percent(2, 1, *_ON_DEVICE)),
    Row("fp16", OPT_30B, 512, 7.32, Policy.from_percent(48, 3, 20, 80, 0, 100, 0, 100)),
    Row("fp16", OPT_175B, 512, 0.69, Policy.from_percent(32, 8, *_HALF_ON_DISK)),
    Row("fp16", OPT_6_7B, 1024, 13.72, Policy.from_percent(1, 1, *_ON_DEVICE)),
    Row("fp16", OPT_30B, 1024, 3.50, Policy.from_percent(20, 4, 4, 96, 0, 100, 0, 100)),
    Row("fp16", OPT_175B, 1024, 0.35, Policy.from_percent(12, 12, *_HALF_ON_DISK)),
    Row("4-bit", OPT_6_7B, 512, 29.12, Policy.from_percent(72, 1, *_ON_DEVICE), ALL_4_BIT),
    Row("4-bit KV", OPT_30B, 512, 8.38, Policy.from_percent(64, 8, *_ON_HOST), KV_4_BIT),
    Row("4-bit", OPT_175B, 512, 1.12, Policy.from_percent(48, 3, *_ON_HOST), ALL_4_BIT),
    Row("4-bit", OPT_6_7B, 1024, 13.18, Policy.from_percent(28, 1, *_ON_DEVICE), ALL_4_BIT),
    Row("4-bit KV", OPT_30B, 1024, 3.98, Policy.from_percent(20, 12, *_ON_HOST), KV_4_BIT),
    Row("4-bit", OPT_175B, 1024, 0.42, Policy.from_percent(12, 4, *_ON_HOST), ALL_4_BIT),
)
"""FlexGen on one T4: in fp16, and with 4-bit codes."""

_30B, _175B = TABLE[1], TABLE[2]
ABLATION = (
    replace(_30B, label="all"),
    replace(_30B, label="no overlap", throughput=5.86, options=Options(overlap=False)),
    replace(_30B, label="no CPU compute", throughput=4.03, options=Options(delegate=False)),
    Row("DeepSpeed's policy", OPT_30B, 512, 1.57, Policy.from_percent(8, 1, 0, 100, 100, 0, 100, 0)),
    replace(_175B, label="all"),
    replace(_175B, label="no overlap", throughput=0.59, options=Options(overlap=False)),
    replace(_175B, label="no CPU compute", throughput=0.62, options=Options(delegate=False)),
    replace(_175B, label="no policy search", throughput=0.27, policy=Policy.from_percent(32, 1, *_HALF_ON_DISK)),
    Row("DeepSpeed's policy", OPT_175B, 512, 0.01, Policy.from_percent(2, 1, 0, 0, 100, 0, 100, 0)),
)
"""FlexGen's runtime with one thing less, in fp16 with prompts of 512 tokens."""

BASELINES = (
    Baseline("Hugging Face Accelerate", OPT_6_7B, 25.12),
    Baseline("Hugging Face Accelerate", OPT_30B, 0.62),
    Baseline("Hugging Face Accelerate", OPT_175B, 0.01),
    Baseline("DeepSpeed ZeRO-Inference", OPT_6_7B, 9.28),
    Baseline("DeepSpeed ZeRO-Inference", OPT_30B, 0.60),
    Baseline("DeepSpeed ZeRO-Inference", OPT_175B, 0.01),
)
"""Other systems on the same machine."""

PIPELINE = (
    Baseline("FlexGen on four nodes", OPT_6_7B, 201.12, 764.65),
    Baseline("FlexGen on four nodes", OPT_30B, 23.61, 48.94),
    Baseline("FlexGen on four nodes", OPT_175B, 2.33, 3.86),
)
"""Pipeline parallelism (section 6) over four such machines."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A measured row, and what the cost model makes of its policy."""

    row: Row
    cost: Cost

    @property
    def ratio(self) -> float:
        """Predicted throughput to measured."""
        return self.cost.throughput / self.row.throughput


def predictions(rows: Iterable[Row] = TABLE, hardware: PaperHardware = T4) -> list[Prediction]:
    """The cost model's prediction for each row of TABLE or ABLATION, whether its policy fits by the formulas or not."""
    return [Prediction(row, evaluate(row.model, hardware, row.job, row.policy, row.options)) for row in rows]
