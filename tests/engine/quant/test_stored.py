"""Stored tensors become fused matrices in a run of bytes; a directory that is not whole is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.checkpoint.index import QUANTISED_FILE, Checkpoint
from engine.checkpoint.layout import FusedTensor, Naming, all_groups
from engine.checkpoint.reader import read_into
from engine.errors import CheckpointError
from engine.quant.copy import quantise_model
from engine.quant.format import CONFIG_ENTRY, Quantisation
from engine.quant.groups import dequantise, quantise
from engine.quant.scheme import Scheme
from engine.quant.stored import FusedCodes, check_model
from engine.spec import ModelSpec
from tests.engine.checkpoint.files import model_of

SCHEMES = [Scheme(4, 16), Scheme(4, 8, "output"), Scheme(4, None, "output"), Scheme(8, 16), Scheme(8, None)]


def copy_of(tmp_path: Path, scheme: Scheme, family: str = "llama-biased") -> tuple[Path, Path]:
    """A tiny model and its quantised copy."""
    source, copy = tmp_path / "model", tmp_path / "copy"
    model_of(family).save_pretrained(source)
    quantise_model(source, copy, Quantisation(scheme))
    return source, copy


@pytest.mark.parametrize("scheme", SCHEMES, ids=Scheme.describe)
@pytest.mark.parametrize("family", ["llama-biased", "qwen3", "opt"])
def test_fused_matrices_are_those_of_the_model_quantised(tmp_path: Path, family: str, scheme: Scheme) -> None:
    source, copy = copy_of(tmp_path, scheme, family)
    spec, original, checkpoint = ModelSpec.from_directory(copy), Checkpoint(source), Checkpoint(copy)
    quantisation, naming = Quantisation.of(copy), Naming.of(checkpoint.names)
    assert quantisation == Quantisation(scheme)
    check_model(checkpoint, spec)
    seen = set()
    for group in all_groups(spec):
        plain = {fused.name: plain_tensor(original, fused) for fused in group}
        for fused in group:
            if not quantisation.covers(fused):
                continue
            codes = FusedCodes.of(checkpoint, naming, fused, scheme)
            memory = torch.full((codes.nbytes,), 255, dtype=torch.uint8)
            fill(codes, memory)
            weight = codes.matrix(memory).expand(torch.empty(fused.size))
            parts = [plain[fused.name][part.row : part.row + part.shape[0]] for part in fused.parts]
            assert torch.equal(weight, torch.cat([dequantise(quantise(part, scheme)) for part in parts])), fused.name
            seen.add(fused.name)
    assert seen == {"qkv.weight", "out.weight", "up.weight", "down.weight"}


def plain_tensor(checkpoint: Checkpoint, fused: FusedTensor) -> torch.Tensor:
    out, naming = torch.empty(fused.shape), Naming.of(checkpoint.names)
    for part in fused.parts:
        read_into(checkpoint.info(naming(part.source)), out[part.row : part.row + part.shape[0]])
    return out


def fill(codes: FusedCodes, memory: torch.Tensor) -> None:
    for info, at in codes.places():
        read_into(info, memory[at : at + info.nbytes].view(info.dtype).view(info.shape))


def stack(shapes: list[tuple[int, int]], scheme: Scheme, tmp_path: Path) -> FusedCodes:
    tensors = {}
    for i, shape in enumerate(shapes):
        q = quantise(torch.randn(shape, generator=torch.Generator().manual_seed(i)), scheme)
        tensors |= {f"{i}.codes": q.codes, f"{i}.scale": q.scale, f"{i}.minimum": q.minimum}
    save_file(tensors, tmp_path / QUANTISED_FILE)
    checkpoint = Checkpoint(tmp_path)
    infos = tuple(
        (checkpoint.info(f"{i}.codes"), checkpoint.info(f"{i}.scale"), checkpoint.info(f"{i}.minimum"))
        for i in range(len(shapes))
    )
    return FusedCodes(scheme, tuple(shapes), infos)


@pytest.mark.parametrize(
    ("scheme", "rows", "stacks"),
    [
        (Scheme(4, 64), (128, 64, 64), True),
        (Scheme(4, 64), (128, 64, 40), True),
        (Scheme(4, 64), (128, 40, 64), False),
        (Scheme(4, 8, "output"), (24, 8, 16), True),
        (Scheme(4, None, "output"), (24, 8, 16), False),
        (Scheme(8, 64), (24, 7, 16), True),
        (Scheme(8, None), (24, 7, 16), True),
        (Scheme(8, 8, "output"), (24, 8, 16), True),
    ],
)
def test_parts_are_one_matrix_where_their_bytes_allow_it(
    tmp_path: Path, scheme: Scheme, rows: tuple[int, ...], stacks: bool
) -> None:
    codes = stack([(count, 128) for count in rows], scheme, tmp_path)
    memory = torch.zeros(codes.nbytes, dtype=torch.uint8)
    fill(codes, memory)
    matrix = codes.matrix(memory)
    assert codes.stacks == stacks
    assert (len(matrix.parts) == 1) == stacks
    expected = torch.cat([dequantise(part) for part in codes._parts(memory)])
    assert torch.equal(matrix.expand(torch.empty(expected.numel())), expected)


def edit(copy: Path, **changes: object) -> None:
    config = json.loads((copy / "config.json").read_text())
    config[CONFIG_ENTRY] |= changes
    (copy / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 2}, "version 2 of the format, this release reads 1.*helios quantize"),
        ({"format": "other"}, "must be an object of format"),
        ({"bits": 5}, "wrongly: bits is 5"),
        ({"group_size": "64"}, "wrongly"),
        ({"bits": 8}, "needs torch.int8"),
        ({"group_size": 8}, "needs"),
        ({"dim": "output"}, "needs"),
        ({"lm_head": True}, "lacks 3 tensors"),
    ],
)
def test_a_config_that_does_not_fit_the_file_is_refused(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    _, copy = copy_of(tmp_path, Scheme(4, 16))
    edit(copy, **changes)
    with pytest.raises(CheckpointError, match=says):
        check_model(Checkpoint(copy), ModelSpec.from_directory(copy))


@pytest.mark.parametrize(
    ("name", "replacement", "says"),
    [
        ("model.layers.0.mlp.up_proj.weight.scale", None, "lacks 1 tensors.*up_proj.weight.scale"),
        ("model.layers.1.self_attn.k_proj.weight.codes", None, "lacks 1 tensors.*k_proj.weight.codes"),
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(48, 32), "does not use: model.layers.0.mlp.up_proj.weight;"),
        ("model.layers.0.mlp.up_proj.weight.minimum", torch.zeros(48, 2), "needs torch.float16"),
        ("model.norm.weight", torch.zeros(31), r"shape \[31\]"),
    ],
)
def test_a_missing_or_foreign_tensor_is_refused(
    tmp_path: Path, name: str, replacement: torch.Tensor | None, says: str
) -> None:
    _, copy = copy_of(tmp_path, Scheme(4, 16))
    tensors = load_file(copy / QUANTISED_FILE)
    tensors.pop(name, None)
    save_file(tensors | ({} if replacement is None else {name: replacement}), copy / QUANTISED_FILE)
    with pytest.raises(CheckpointError, match=says):
        check_model(Checkpoint(copy), ModelSpec.from_directory(copy))


def test_the_file_says_how_it_is_quantised(tmp_path: Path) -> None:
    _, copy = copy_of(tmp_path, Scheme(4, None, "output"))
    with safe_open(copy / QUANTISED_FILE, "pt") as file:
        assert file.metadata() == {
            "format": "helios-quantized",
            "version": "1",
            "bits": "4",
            "group_size": "null",
            "dim": '"output"',
            "lm_head": "false",
        }
