"""The simulated machine: times that can be worked out by hand, and what the real engine would refuse."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError, OutOfMemoryError
from engine.planner.hardware import Hardware
from engine.planner.job import Job
from engine.planner.simulator.clock import Clock, Link
from engine.planner.simulator.run import Simulation, simulate
from engine.quant.format import Quantisation
from engine.quant.scheme import Scheme
from engine.sizes import Sizes
from engine.units import units

from .machines import flat, laptop, llama, processor, workstation

MIB = 2**20
JOB = Job(prompt_len=40, gen_len=5, n_sequences=6)
FAST = processor(
    products={"bfloat16": flat(1e15)}, decode_attention=flat(1e15), chunk_attention=flat(1e15), layer_s=0.0
)
FAST = replace(FAST, memory_bytes_s=1e15, sweep_s=0.0)


def run(hardware: Hardware, job: Job = JOB, quantisation: Quantisation | None = None, **fields: Any) -> Simulation:
    config = EngineConfig(
        model="simulated",
        **{"memory_bytes": 200 * MIB, "context": job.context, "max_sequences": job.n_sequences, **fields},
    )
    return simulate(config, Sizes(llama(), torch.bfloat16, quantisation), hardware, job)


def test_every_token_is_made() -> None:
    found = run(laptop())
    assert found.tokens == JOB.n_sequences * JOB.gen_len
    assert found.decode_tokens == JOB.n_sequences * (JOB.gen_len - 1)
    assert found.total_s > 0


def test_weights_on_disk_take_the_time_the_disk_needs() -> None:
    sizes = Sizes(llama(), torch.bfloat16)
    layers = sum(sizes.matrices(unit) for unit in units(4) if unit.kind in ("attention", "mlp"))
    nowhere = {"device": ["embedding", "head"], "disk": ["layers.0-3"]}
    found = run(laptop(device=FAST, disk_read=1e8), weights=nowhere)
    expected = found.sweeps * layers / 1e8
    # What the slots hold when the job begins was read before, and the last reading ahead is for nobody.
    assert found.total_s == pytest.approx(expected, rel=0.2)
    reads = sum(busy.end_s - busy.start_s for busy in found.timeline if busy.resource == "disk read")
    assert reads == pytest.approx(found.total_s, rel=0.25)


def test_reading_ahead_hides_what_is_computed_meanwhile() -> None:
    nowhere = {"device": ["embedding", "head"], "disk": ["layers.0-3"]}
    both = laptop(disk_read=2e8, device=processor(products={"bfloat16": flat(2e9)}))
    overlapped, apart = run(both, weights=nowhere), run(both, weights=nowhere, read_ahead=False)
    resident = run(both)
    assert resident.total_s < overlapped.total_s < apart.total_s


def test_a_processor_that_reads_computes_more_slowly() -> None:
    nowhere = {"device": ["embedding", "head"], "disk": ["layers.0-3"]}
    slow = processor(products={"bfloat16": flat(1e9)})
    free, shared = (run(laptop(device=slow, read_cpu_s=cpu), weights=nowhere) for cpu in (0.0, 2e-10))
    assert free.total_s < shared.total_s < 1.3 * free.total_s


def test_attention_on_the_host_is_slower_with_a_slower_host() -> None:
    fields: dict[str, Any] = {"kv_tokens": 0, "kv_host_tokens": 6 * 48, "host_bytes": 100 * MIB}
    fast, slow = (
        run(workstation(host=processor(decode_attention=flat(rate))), **fields).decode_s for rate in (1e10, 1e8)
    )
    assert fast < slow


def test_kv_on_disk_is_read_and_written() -> None:
    found = run(laptop(), kv_tokens=0, kv_disk_tokens=6 * 48)
    moved = {busy.resource for busy in found.timeline}
    assert {"disk read", "disk write"} <= moved
    assert found.total_s > run(laptop()).total_s
    assert found.memory["disk"]["kv"] > 0


@pytest.mark.parametrize("schedule", ["zigzag", "diagonal", "continuous"])
def test_schedules_make_the_same_tokens(schedule: str) -> None:
    assert run(laptop(), schedule=schedule).tokens == JOB.n_sequences * JOB.gen_len


def test_quantised_weights_are_expanded_for_many_rows() -> None:
    found = run(laptop(), quantisation=Quantisation(Scheme(4, 64)))
    assert "expanding weights" in {busy.what for busy in found.timeline}
    assert found.memory["device"]["weights"] < run(laptop()).memory["device"]["weights"]


def test_kv_in_codes_takes_less_room() -> None:
    wide, narrow = (run(laptop(), kv_tokens=6 * 48, kv_dtype=kind).memory["device"]["kv"] for kind in ("auto", "int4"))
    assert narrow < 0.4 * wide


def test_what_does_not_fit_is_refused_as_by_the_engine() -> None:
    with pytest.raises(OutOfMemoryError, match="the memory limit is"):
        run(laptop(), memory_bytes=MIB)
    with pytest.raises(OutOfMemoryError, match="disk"):
        run(laptop(disk_bytes=1000), kv_tokens=0, kv_disk_tokens=6 * 48, disk_bytes=1000)


def test_sequences_without_room_are_not_forgotten() -> None:
    with pytest.raises(ConfigError, match="find no room"):
        run(laptop(), kv_tokens=0, kv_disk_tokens=16, context=16)


def test_a_link_carries_one_transfer_after_another() -> None:
    clock = Clock()
    link = Link(clock, "disk", read=100.0, write=50.0)
    assert link.carry(100, 0.0, "load") == 1.0
    assert link.carry(100, 0.5, "store", store=True) == 3.0
    assert link.carry(0, 7.0, "load") == 7.0
    clock.wait_until(2.0)
    clock.wait_until(1.0)
    assert clock.now_s == 2.0
