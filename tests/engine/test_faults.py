"""Disks that fail, fill up or change under a running engine: who is harmed is told why, and nobody else notices."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import Schedule
from engine.engine import Engine
from engine.errors import CheckpointError, HeliosError
from engine.kv_homes import StagedKV
from engine.storage import direct
from engine.storage.spill import SpillFile
from tests.engine.serving import ALL_ON_DISK, MANY, PROMPTS, Served, expected, failing, ids, with_kv_on_disk
from tests.engine.test_parity import random_tokens


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def overwrite(file: Path) -> None:
    with file.open("r+b") as other:
        other.seek(-64, os.SEEK_END)
        other.write(b"\0" * 64)
    os.utime(file)


@pytest.mark.parametrize(
    ("damage", "words"),
    [(truncate, "Get the model again|Load it again"), (overwrite, "was changed while the model was running.*Load it")],
)
@pytest.mark.parametrize("read_ahead", [True, False])
def test_a_weight_file_damaged_in_mid_run_ends_requests_with_the_reason(
    model: Path, load: Callable[..., Engine], damage: Callable[[Path], None], words: str, read_ahead: bool
) -> None:
    right, file = expected(model, PROMPTS), model / "model.safetensors"
    content, times = file.read_bytes(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    engine = load(model, weights=ALL_ON_DISK, read_ahead=read_ahead)
    served = Served(engine, PROMPTS)
    for _ in range(4):
        engine.step()
    damage(file)
    for completion, all_right in zip(served.finish(), right, strict=True):
        assert completion.finish_reason == "error"
        assert isinstance(completion.error, CheckpointError)
        assert re.search(words, str(completion.error))
        got = [token.id for token in completion.tokens]
        assert got == all_right[: len(got)], "what was delivered before is right"
    stats = engine.stats()
    assert (stats.failed_requests, stats.running, stats.waiting, stats.kv_blocks_used) == (3, 0, 0, 0)
    assert all(completion.error for completion in Served(engine, PROMPTS).finish()), "new ones are told too"
    file.write_bytes(content)
    os.utime(file, ns=times)
    assert ids(Served(engine, PROMPTS).finish()) == right, "as soon as the file is as it was, all goes on"


@pytest.mark.parametrize("units", [["embedding"], ["embedding", "head"], ["layers.1.mlp"]])
def test_a_changed_file_is_noticed_whatever_is_read_from_it(
    model: Path, load: Callable[..., Engine], units: list[str]
) -> None:
    every = ["embedding", *(f"layers.{i}.{kind}" for i in range(3) for kind in ("attention", "mlp")), "head"]
    engine = load(model, weights={"disk": units, "device": [unit for unit in every if unit not in units]})
    served = Served(engine, PROMPTS)
    engine.step()
    overwrite(model / "model.safetensors")
    assert {completion.finish_reason for completion in served.finish()} == {"error"}


def test_weights_that_cannot_be_read_for_a_while_end_what_runs_and_nothing_after(
    model: Path, load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = expected(model, PROMPTS)
    engine = load(model, weights=ALL_ON_DISK)
    served = Served(engine, PROMPTS)
    engine.step()
    monkeypatch.setattr(direct.os, "preadv", failing(os.preadv, lambda _: True))
    for completion in served.finish():
        assert completion.finish_reason == "error"
        assert "Input/output error; check the disk" in str(completion.error)
    monkeypatch.undo()
    assert ids(Served(engine, PROMPTS).finish()) == right


def within(home: StagedKV, blocks: list[int], layer: int) -> Callable[[Any, int], bool]:
    """Whether an offset of a spill is in those blocks of a layer."""
    size = home.layout.block_bytes
    return lambda spill, offset: spill is home._spills[layer] and offset // size in blocks


@pytest.mark.parametrize("read_ahead", [True, False])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("what", ["read", "write"])
def test_kv_that_cannot_be_moved_ends_its_cohort_and_no_other_sequence(
    model: Path,
    load: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    layer: int,
    read_ahead: bool,
) -> None:
    right = expected(model, MANY)
    engine, home = with_kv_on_disk(load, model, read_ahead=read_ahead)
    served = Served(engine, MANY)
    for _ in range(3):
        engine.step()
    victim = engine._sequences[served.requests[3].request_id]
    fails = within(home, list(victim.blocks), layer)
    moved = getattr(SpillFile, what)

    def move(self: SpillFile, offset: int, data: Any) -> None:
        if fails(self, offset):
            raise HeliosError("the offload file failed")
        moved(self, offset, data)

    monkeypatch.setattr(SpillFile, what, move)
    for _ in range(2):
        engine.step()
    monkeypatch.undo()
    completions = served.finish()
    harmed = [completion for completion in completions if completion.finish_reason == "error"]
    assert completions[3] in harmed
    assert 1 <= len(harmed) < len(MANY)
    for completion, all_right in zip(completions, right, strict=True):
        got = [token.id for token in completion.tokens]
        if completion in harmed:
            assert str(completion.error) == "the offload file failed"
            assert got == all_right[: len(got)]
        else:
            assert got == all_right
    assert engine.stats().kv_blocks_used == 0
    assert ids(Served(engine, MANY).finish()) == right, "the blocks are as good as new"


@pytest.mark.parametrize("schedule", ["continuous", "zigzag"])
def test_a_write_that_failed_harms_a_sequence_that_sits_out_the_next_sweep(
    model: Path, load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, schedule: Schedule
) -> None:
    """In a zig-zag block the first prompts wait for the others: their KV is stored long before it is read again."""
    prompts = [random_tokens(20, seed=seed) for seed in range(4)]
    right = expected(model, prompts)
    engine, home = with_kv_on_disk(load, model, schedule=schedule, prefill_rows=20, max_sequences=4)
    served = Served(engine, prompts)
    victim, written, failed = engine._sequences[served.requests[0].request_id], SpillFile.write, list[int]()

    def write(self: SpillFile, offset: int, data: Any) -> None:
        if not failed and within(home, victim.blocks, 2)(self, offset):
            failed.append(offset)
            raise HeliosError("the offload file failed")
        written(self, offset, data)

    monkeypatch.setattr(SpillFile, "write", write)
    completions = served.finish()
    assert failed
    assert completions[0].finish_reason == "error"
    assert ids(completions[1:]) == right[1:]


@pytest.mark.parametrize("schedule", ["continuous", "zigzag", "diagonal"])
def test_a_disk_that_stays_broken_ends_every_request(
    model: Path, load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, schedule: Schedule
) -> None:
    engine, _ = with_kv_on_disk(load, model, schedule=schedule)

    def fail(*_: object) -> None:
        raise HeliosError("the offload file failed")

    monkeypatch.setattr(SpillFile, "write", fail)
    assert {completion.finish_reason for completion in Served(engine, MANY).finish()} == {"error"}
    assert engine.stats().kv_blocks_used == 0


def test_cancelling_while_kv_moves_leaves_the_others_as_they_were(model: Path, load: Callable[..., Engine]) -> None:
    right = expected(model, MANY)
    engine, _ = with_kv_on_disk(load, model)
    served = Served(engine, MANY)
    for step in range(6):
        engine.step()
        engine.cancel(served.requests[step].request_id)
    completions = served.finish()
    assert [completion.finish_reason for completion in completions] == ["cancelled"] * 6 + ["length"] * 2
    assert ids(completions[6:]) == right[6:]
