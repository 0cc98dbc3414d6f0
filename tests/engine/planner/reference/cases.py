"""Models, machines, jobs and blocks for the tests: a toy whose figures can be worked out by hand, and random ones."""

from typing import NamedTuple

import numpy as np

from engine.planner.reference.model import GB, T4, Job, Options, PaperHardware, PaperModel

TOY = PaperModel("toy", n_layers=2, h1=4, h2=16, n_heads=2)
TOY_JOB = Job(s=3, n=4)
TOY_MACHINE = PaperHardware(
    name="toy",
    ctog_bdw=2,
    gtoc_bdw_kv=4,
    gtoc_bdw_act=8,
    dtoc_bdw=5,
    ctod_bdw_kv=16,
    ctod_bdw=3,
    mm_flops_prefill=100,
    mm_flops_decode=50,
    bmm_flops_prefill=10,
    bmm_flops_decode=8,
    cpu_flops=20,
    device_bytes=4000,
    host_bytes=4000,
    disk_bytes=4000,
)
RATES = [name for name in PaperHardware.__slots__ if "bdw" in name or "flops" in name]


class Case(NamedTuple):
    """Everything that a linear programme is made of."""

    model: PaperModel
    hardware: PaperHardware
    job: Job
    gbs: int
    n_batches: int
    options: Options


def random_case(rng: np.random.Generator) -> Case:
    """Sizes of the OPT family, rates around the T4's, and memories that now and then are too small."""
    h1 = 256 * int(rng.integers(2, 49))
    model = PaperModel("random", int(rng.integers(2, 97)), h1, h1 * int(rng.integers(1, 6)), h1 // 64)
    total = model.n_layers * model.layer_bytes
    rates = {name: getattr(T4, name) * float(10 ** rng.uniform(-1, 1)) for name in RATES}
    hardware = PaperHardware(
        name="random",
        **rates,
        device_bytes=float(rng.uniform(2, 40)) * GB,
        host_bytes=float(rng.uniform(0.2, 1.5)) * total,
        disk_bytes=float(rng.choice([0.0, 1.0, 20.0])) * total,
    )
    return Case(
        model,
        hardware,
        Job(int(rng.integers(1, 1500)), int(rng.integers(1, 200))),
        int(rng.integers(1, 40)),
        int(rng.integers(1, 12)),
        Options(*(bool(flag) for flag in rng.integers(0, 2, size=4))),
    )
