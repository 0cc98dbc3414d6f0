"""Layouts of units: what is read is what the file holds, wherever its tensors begin."""

import json
from pathlib import Path

import pytest
import torch

import engine.units
from engine.checkpoint.index import Checkpoint
from engine.device import CpuDevice
from engine.sizes import Sizes
from engine.spec import ModelSpec
from engine.storage.direct import Bounce
from engine.storage.storage import Storage
from engine.units import MATRICES, Layouts, Unit, group_of, units
from tests.engine.tiny import CONFIGS, save_tiny

SPEC = ModelSpec.from_config(CONFIGS["llama"].to_dict())


def shift_header(file: Path, by: int) -> None:
    """Write the safetensors file anew with a header that ends ``by`` bytes behind a multiple of 8."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.dumps(json.loads(raw[8 : 8 + length])).encode()
    header += b" " * ((by - len(header)) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


@pytest.fixture(scope="module", params=[0, 1, 2, 4])
def shifted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny(tmp_path_factory.mktemp("shifted"))
    shift_header(directory / "model.safetensors", request.param)
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_unit_is_read_wherever_its_tensors_begin(
    shifted: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Tensors longer than a piece, behind a header that some writers do not pad."""
    monkeypatch.setattr(engine.units, "PIECE_BYTES", 4096)
    checkpoint = Checkpoint(shifted)
    layouts, bounce = Layouts(checkpoint, SPEC, dtype, None, Storage()), Bounce()
    for unit in units(SPEC.n_layers):
        tensors = [tensor for tensor in group_of(SPEC, unit) if tensor.name in MATRICES]
        layout = layouts.of(tensors)
        slot = CpuDevice(dtype, 1).open_slot(layout.n_bytes)
        for piece in layout.recipe.pieces:
            piece.run(slot.host, bounce)
        for tensor in tensors:
            parts = [_stored(checkpoint, layouts.info(part.source).name) for part in tensor.parts]
            assert torch.equal(layout.views(slot.content)[tensor.name], torch.cat(parts).to(dtype)), f"{unit}"
    layouts.close()


def _stored(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    info = checkpoint.info(name)
    raw = bytearray(info.file.read_bytes()[info.offset : info.offset + info.nbytes])
    return torch.frombuffer(raw, dtype=info.dtype).view(info.shape)


def test_a_slot_of_the_budget_holds_any_unit(tmp_path: Path) -> None:

    for name in CONFIGS:
        directory = save_tiny(tmp_path / name, name)
        spec = ModelSpec.from_directory(directory)
        layouts = Layouts(Checkpoint(directory), spec, torch.float32, None, Storage())
        for unit in units(spec.n_layers):
            if unit.kind not in ("embedding", "head"):
                group = group_of(spec, unit)
                for part in (
                    [tensor for tensor in group if tensor.name in MATRICES],
                    [tensor for tensor in group if tensor.name not in MATRICES],
                ):
                    assert layouts.of(part).n_bytes <= Sizes(spec, torch.float32).slot, f"{name} {unit}"
        layouts.close()


def test_units_are_named_as_a_configuration_names_them() -> None:
    assert [str(unit) for unit in units(1)] == ["embedding", "layers.0.attention", "layers.0.mlp", "head"]
    assert str(Unit("head", 3)) == "head"
