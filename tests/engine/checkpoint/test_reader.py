"""Tensors arrive bit for bit, converted where asked."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint import reader
from engine.checkpoint.index import Checkpoint
from engine.checkpoint.reader import read_into
from engine.errors import CheckpointError

SHAPE = (7, 5)


@pytest.fixture
def weights() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def _saved(directory: Path, **tensors: torch.Tensor) -> Checkpoint:
    save_file(tensors, directory / "model.safetensors")
    return Checkpoint(directory)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("staging_bytes", [reader.STAGING_BYTES, 24])
def test_every_type_reads_as_every_other(
    tmp_path: Path, weights: torch.Tensor, stored: torch.dtype, wanted: torch.dtype, staging_bytes: int
) -> None:
    info = _saved(tmp_path, a=weights.to(stored)).info("a")
    out = torch.empty(SHAPE, dtype=wanted)
    read_into(info, out, torch.empty(staging_bytes, dtype=torch.uint8))
    assert torch.equal(out, weights.to(stored).to(wanted))


def test_rows_of_a_larger_tensor_are_filled_in_place(tmp_path: Path, weights: torch.Tensor) -> None:
    info = _saved(tmp_path, a=weights).info("a")
    fused = torch.zeros(9, 5)
    read_into(info, fused[1:8])
    assert torch.equal(fused[1:8], weights)
    assert not fused[0].any()
    assert not fused[8].any()


def test_an_empty_and_a_scalar_tensor_can_be_read(tmp_path: Path) -> None:
    checkpoint = _saved(tmp_path, empty=torch.empty(0, 4), scalar=torch.tensor(3.5))
    read_into(checkpoint.info("empty"), torch.empty(0, 4))
    out = torch.zeros(())
    read_into(checkpoint.info("scalar"), out)
    assert out == 3.5


def test_short_reads_are_continued(tmp_path: Path, weights: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "READ_BYTES", 3)
    out = torch.empty(SHAPE)
    read_into(_saved(tmp_path, a=weights).info("a"), out)
    assert torch.equal(out, weights)


@pytest.mark.parametrize("out", [torch.empty(5, 7), torch.empty(5, 7).T, torch.empty(SHAPE, device="meta")])
def test_memory_that_does_not_fit_is_refused(tmp_path: Path, weights: torch.Tensor, out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="'a' has shape"):
        read_into(_saved(tmp_path, a=weights).info("a"), out)


def test_a_file_cut_short_after_opening_is_an_error(tmp_path: Path, weights: torch.Tensor) -> None:
    info = _saved(tmp_path, a=weights).info("a")
    with info.file.open("r+b") as file:
        file.truncate(info.offset + 10)
    with pytest.raises(CheckpointError, match=f"ends at byte {info.offset + 10}, inside tensor 'a'"):
        read_into(info, torch.empty(SHAPE))


def test_a_file_that_vanished_is_an_error(tmp_path: Path, weights: torch.Tensor) -> None:
    info = _saved(tmp_path, a=weights).info("a")
    info.file.unlink()
    with pytest.raises(CheckpointError, match="cannot be opened"):
        read_into(info, torch.empty(SHAPE))
