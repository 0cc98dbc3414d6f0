"""The FlexGen paper's machine and policies: its formulas' predictions, and our plans beside its policies, simulated."""

from dataclasses import dataclass, replace

import torch

from engine.config import TIERS, EngineConfig, TierName
from engine.errors import HeliosError
from engine.kv import BLOCK, blocks_for
from engine.planner.hardware import Hardware
from engine.planner.job import Job
from engine.planner.places import compact, in_parts
from engine.planner.placing import Counts, named_units
from engine.planner.processor import Curve, Processor
from engine.planner.reference.model import T4, PaperHardware, PaperModel
from engine.planner.reference.paper import TABLE, Row
from engine.planner.search import Tried, search
from engine.planner.simulator.run import Simulation
from engine.planner.simulator.sample import predict_run
from engine.planner.task import Task
from engine.quant.format import Quantisation
from engine.quant.scheme import Scheme
from engine.spec import ModelSpec

VOCABULARY = 50272
DECODE_ROWS, PREFILL_ROWS = 256, 512
"""Rows up to which a product has the paper's decode rate, and from which it has its prefill rate."""
FREE = 1e15
"""A rate of what the paper's formulas leave out."""
SEQUENCES = 8192
"""Prompts there are: so many that a last block that is not full does not count."""


def machine(paper: PaperHardware = T4) -> Hardware:
    """The paper's machine as this planner sees one. Attention to a byte of KV in fp16 is one operation."""

    def processor(attention: float) -> Processor:
        products = Curve(((DECODE_ROWS, paper.mm_flops_decode), (PREFILL_ROWS, paper.mm_flops_prefill)))
        return Processor(
            products={"float16": products},
            decode_attention=Curve(((1.0, attention),)),
            chunk_attention=Curve(((1.0, paper.bmm_flops_prefill),)),
            memory_bytes_s=FREE,
            expand_elements_s=FREE,
            layer_s=0.0,
            sweep_s=0.0,
        )

    return Hardware(
        name="t4 of the paper",
        description="The constants of FlexGen's cost model for its authors' machine",
        device=processor(paper.bmm_flops_decode),
        device_bytes=int(paper.device_bytes),
        host=processor(paper.cpu_flops),
        host_bytes=int(paper.host_bytes),
        disk_bytes=int(paper.disk_bytes),
        disk_read=paper.dtoc_bdw,
        disk_write=paper.ctod_bdw_kv,
        to_device=paper.ctog_bdw,
        to_host=paper.gtoc_bdw_kv,
    )


def opt(model: PaperModel) -> ModelSpec:
    """The architecture with its embeddings and its head."""
    return ModelSpec.from_config(
        {
            "model_type": "opt",
            "vocab_size": VOCABULARY,
            "hidden_size": model.h1,
            "ffn_dim": model.h2,
            "num_hidden_layers": model.n_layers,
            "num_attention_heads": model.n_heads,
            "word_embed_proj_dim": model.h1,
            "max_position_embeddings": 2048,
            "activation_function": "relu",
            "do_layer_norm_before": True,
        }
    )


@dataclass(frozen=True, slots=True)
class Match:
    """The paper's policy, in whole units, and the plan found, on the paper's machine."""

    row: Row
    paper: Simulation | None
    """None if the engine refuses the policy."""
    refused: str
    ours: Tried

    @property
    def ratio(self) -> float:
        """Of our plan's simulated throughput to the policy's; 0 if that does not fit."""
        return self.ours.simulation.throughput / self.paper.throughput if self.paper else 0.0


def task(row: Row) -> Task:
    """What the planner is asked for a row of the paper's table."""
    return Task(
        model=row.model.name,
        spec=opt(row.model),
        hardware=machine(),
        job=Job(row.s, row.job.n, SEQUENCES),
        dtype=torch.float16,
        quantisation=Quantisation(Scheme(4, 64)) if row.options.compress_weights else None,
        memory_bytes=int(T4.device_bytes),
        host_bytes=int(T4.host_bytes),
        disk_bytes=int(T4.disk_bytes),
        kv_int4=row.options.compress_kv,
    )


def in_whole_units(row: Row) -> EngineConfig:
    """The paper's policy as the engine can have it: each fraction rounded to layers, sequences, and rows."""
    base, policy = task(row).base(), row.policy
    given = policy.fractions
    weights = dict(zip(TIERS, (given.wg, given.wc, given.wd), strict=True))
    kv = dict(zip(TIERS, (given.cg, given.cc, given.cd), strict=True))
    layers = in_parts(weights, row.model.n_layers)
    ends: TierName = "device" if given.wg == 1 else "host"
    of = {(kind, tier): layers[tier] for kind in ("attention", "mlp") for tier in TIERS}
    of |= {(kind, tier): int(tier == ends) for kind in ("embedding", "head") for tier in TIERS}
    units = named_units(row.model.n_layers, Counts(of, {}, 0.0, 0.0, 0.0))  # type: ignore[arg-type]
    sequences = in_parts(kv, policy.block_size)
    tokens = {tier: n * blocks_for(base.context or 0) * BLOCK for tier, n in sequences.items()}
    rows = policy.block_size * (row.s + 1)
    tile = min(base.tile_rows, rows)
    whole = -(-rows // tile) * tile
    return replace(
        base,
        max_sequences=policy.block_size,
        max_queued=max(base.max_queued, policy.block_size),
        prefill_rows=policy.block_size * row.s,
        schedule="zigzag",
        weights={tier: compact(names) for tier, names in units.items()},
        kv_tokens=tokens["device"],
        kv_host_tokens=tokens["host"],
        kv_disk_tokens=tokens["disk"],
        kv_dtype="int4" if row.options.compress_kv else "auto",
        delegate=row.options.delegate,
        activation_rows=whole if given.hg else 0,
        activation_host_rows=0 if given.hg else whole,
    )


def match(row: Row) -> Match:
    """Both on the paper's machine."""
    given = task(row)
    config, paper, refused = in_whole_units(row), None, ""
    try:
        job = replace(given.job, n_sequences=config.max_sequences)
        paper = predict_run(config, given.sizes, given.hardware, job)
    except HeliosError as error:
        refused = str(error)
    return Match(row, paper, refused, search(given).ranked[0])


def matches() -> list[Match]:
    return [match(row) for row in TABLE]
