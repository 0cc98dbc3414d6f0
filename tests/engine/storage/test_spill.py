"""Spill files: what is written is what is read, a full disk is told at once, and nothing stays behind."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from engine.errors import HeliosError, OutOfMemoryError
from engine.memory import page_aligned
from engine.storage.direct import ALIGN
from engine.storage.spill import BlockPiece, SpillFile, SpillMemory

UNITS = 12


def random_bytes(count: int, seed: int) -> Tensor:
    memory = page_aligned((count,), torch.uint8)
    return memory.random_(0, 256, generator=torch.Generator().manual_seed(seed))


def spill(kind: str, directory: Path, unit: int) -> SpillFile | SpillMemory:
    if kind == "file":
        return SpillFile(directory, UNITS * unit, unit)
    return SpillMemory(page_aligned((UNITS * unit,), torch.uint8))


@pytest.mark.parametrize("kind", ["file", "memory"])
@settings(max_examples=15, deadline=None)
@given(
    unit=st.sampled_from([ALIGN, 2 * ALIGN, 1024, 1000]),
    writes=st.lists(st.tuples(st.integers(0, UNITS - 1), st.integers(1, 4)), max_size=8),
)
def test_reads_see_the_latest_writes(
    tmp_path_factory: pytest.TempPathFactory, kind: str, unit: int, writes: list[tuple[int, int]]
) -> None:
    target = spill(kind, tmp_path_factory.getbasetemp() / "spill", unit)
    plain = torch.zeros(UNITS * unit, dtype=torch.uint8)
    try:
        for seed, (first, count) in enumerate(writes):
            data = random_bytes(min(count, UNITS - first) * unit, seed)
            target.write(first * unit, data)
            plain[first * unit : first * unit + len(data)] = data
        into = page_aligned((UNITS * unit,), torch.uint8)
        for unit_ in range(UNITS):
            target.read(unit_ * unit, into[unit_ * unit : (unit_ + 1) * unit])
        assert torch.equal(into, plain)
    finally:
        target.close()


def test_a_piece_moves_its_part_of_a_slot_both_ways(tmp_path: Path) -> None:
    target, slot = SpillFile(tmp_path, 4 * ALIGN, ALIGN), random_bytes(4 * ALIGN, 1)
    BlockPiece(target, 2 * ALIGN, ALIGN, ALIGN, store=True).run(slot, None)
    kept, slot = slot.clone(), page_aligned((4 * ALIGN,), torch.uint8)
    BlockPiece(target, 2 * ALIGN, 0, ALIGN, store=False).run(slot, None)
    assert torch.equal(slot[:ALIGN], kept[ALIGN : 2 * ALIGN])
    assert not slot[ALIGN:].any()
    target.close()


def test_the_directory_is_made_and_lists_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "folder"
    target = SpillFile(directory, 10 * ALIGN, ALIGN)
    assert list(directory.iterdir()) == []
    assert os.fstat(target._fd).st_blocks * 512 >= 10 * ALIGN, "the space is taken at once"
    target.close()
    assert list(directory.iterdir()) == []


def test_units_that_disk_blocks_do_not_divide_go_through_the_page_cache(tmp_path: Path) -> None:
    target = SpillFile(tmp_path, 10_000, 1000)
    assert not target.direct
    target.close()


@pytest.mark.parametrize("lacking", ["O_DIRECT", "O_TMPFILE", "both"])
def test_a_file_system_without_direct_io_or_unnamed_files_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    plain = os.open

    def limited(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECT and lacking in ("O_DIRECT", "both"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if flags & os.O_TMPFILE == os.O_TMPFILE and lacking in ("O_TMPFILE", "both"):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return plain(path, flags, *args)

    monkeypatch.setattr(os, "open", limited)
    target = SpillFile(tmp_path, 2 * ALIGN, ALIGN)
    assert target.direct == (lacking == "O_TMPFILE")
    assert list(tmp_path.iterdir()) == []
    data, into = random_bytes(ALIGN, 1), page_aligned((ALIGN,), torch.uint8)
    target.write(ALIGN, data)
    target.read(ALIGN, into)
    assert torch.equal(data, into)
    target.close()


@pytest.mark.parametrize("most", [ALIGN, 3 * ALIGN])
def test_transfers_that_do_less_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    reads, writes = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: reads(fd, [views[0][:most]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: writes(fd, [views[0][:most]], at))
    target, data, into = SpillFile(tmp_path, 8 * ALIGN, ALIGN), random_bytes(8 * ALIGN, 2), random_bytes(8 * ALIGN, 3)
    target.write(0, data)
    target.read(0, into)
    assert torch.equal(data, into)
    target.close()


@pytest.mark.parametrize("what", ["preadv", "pwritev"])
def test_a_failing_transfer_names_directory_reason_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    target, data = SpillFile(tmp_path, 8 * ALIGN, ALIGN), random_bytes(ALIGN, 1)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, what, fail)
    move = target.read if what == "preadv" else target.write
    with pytest.raises(HeliosError, match=rf"4.00 KiB .*{tmp_path} failed: Input/output error; check the disk"):
        move(0, data)
    target.close()


def test_a_full_disk_names_size_directory_and_remedy_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OutOfMemoryError, match=rf"3.00 GiB .*{tmp_path} has .*No space left.*offload_dir"):
        SpillFile(tmp_path, 3 * 2**30, ALIGN)
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_directory_that_cannot_be_made_is_told_with_the_remedy(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(HeliosError, match=r"file.* choose another offload_dir"):
        SpillFile(tmp_path / place, ALIGN, ALIGN)


_HOLDER = """
import os, signal, sys
from pathlib import Path
import torch
from engine.memory import page_aligned
from engine.storage import spill
if sys.argv[2] == "named":
    del os.O_TMPFILE
held = spill.SpillFile(Path(sys.argv[1]), 64 * 4096, 4096)
held.write(4096, page_aligned((4096,), torch.uint8))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["unnamed", "named"])
def test_nothing_stays_when_the_process_is_killed(tmp_path: Path, kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", _HOLDER, str(tmp_path), kind], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(tmp_path.iterdir()) == []
