"""Fused tensors hold what transformers' modules hold; a checkpoint that differs from its config is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint import layout
from engine.checkpoint.index import Checkpoint
from engine.checkpoint.layout import check
from engine.checkpoint.reader import read_into
from engine.errors import CheckpointError
from engine.spec import ModelSpec

from .files import CONFIGS, model_of

FAMILIES = tuple(CONFIGS)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    model_of("llama").save_pretrained(tmp_path)
    return tmp_path


def load(directory: Path, group: layout.Group) -> dict[str, torch.Tensor]:
    tensors = {fused.name: torch.full(fused.shape, torch.nan) for fused in group}
    checkpoint = Checkpoint(directory)
    naming = layout.Naming.of(checkpoint.names)
    for fused in group:
        for part in fused.parts:
            read_into(checkpoint.info(naming(part.source)), tensors[fused.name][part.row : part.row + part.shape[0]])
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_tensors_equal_the_modules_of_transformers(tmp_path: Path, family: str) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path)
    spec = ModelSpec.from_directory(tmp_path)
    check(Checkpoint(tmp_path), spec)
    trunk = model.model.decoder if family == "opt" else model.model
    for number, layer in enumerate(trunk.layers):
        attention = load(tmp_path, layout.attention_group(spec, number))
        mlp = load(tmp_path, layout.mlp_group(spec, number))
        _assert_same(attention, _attention_of(layer))
        _assert_same(mlp, _mlp_of(layer))
    embedding = {"tokens": [trunk.embed_tokens]}
    if family == "opt":
        embedding["positions"] = [trunk.embed_positions]
    _assert_same(load(tmp_path, layout.embedding_group(spec)), embedding)
    head = {"norm": [trunk.final_layer_norm if family == "opt" else trunk.norm]}
    if not spec.tied:
        head["lm_head"] = [model.lm_head]
    _assert_same(load(tmp_path, layout.head_group(spec)), head)


Modules = dict[str, list[torch.nn.Module]]


def _attention_of(layer: torch.nn.Module) -> Modules:
    attention = layer.self_attn
    modules = {
        "norm": [getattr(layer, "input_layernorm", None) or layer.self_attn_layer_norm],
        "qkv": [attention.q_proj, attention.k_proj, attention.v_proj],
        "out": [getattr(attention, "o_proj", None) or attention.out_proj],
    }
    if hasattr(attention, "q_norm"):
        modules |= {"q_norm": [attention.q_norm], "k_norm": [attention.k_norm]}
    return modules


def _mlp_of(layer: torch.nn.Module) -> Modules:
    if hasattr(layer, "fc1"):
        return {"norm": [layer.final_layer_norm], "up": [layer.fc1], "down": [layer.fc2]}
    mlp = layer.mlp
    return {"norm": [layer.post_attention_layernorm], "up": [mlp.gate_proj, mlp.up_proj], "down": [mlp.down_proj]}


def _assert_same(tensors: dict[str, torch.Tensor], modules: Modules) -> None:
    """The same names, biases included, and the same values."""
    expected = {
        f"{name}.{kind}": torch.cat([getattr(module, kind) for module in parts])
        for name, parts in modules.items()
        for kind in ("weight", "bias")
        if getattr(parts[0], kind, None) is not None
    }
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_cover_the_rows_of_each_fused_tensor(family: str) -> None:
    spec = ModelSpec.from_config(CONFIGS[family].to_dict())
    for group in layout.all_groups(spec):
        for fused in group:
            row = 0
            for part in fused.parts:
                assert part.row == row
                row += part.shape[0]
            assert row == fused.shape[0]


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("llama-tied", "model.", ""),
        ("llama", "", "language_model."),
        ("opt", "model.decoder.", "decoder."),
        ("opt", "model.decoder.", ""),
    ],
)
def test_a_checkpoint_saved_from_another_module_level_is_understood(
    tmp_path: Path, family: str, old: str, new: str
) -> None:
    model = model_of(family)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({new + name.removeprefix(old): tensor for name, tensor in load_file(file).items()}, file)
    spec = ModelSpec.from_directory(tmp_path)
    check(Checkpoint(tmp_path), spec)
    tokens = load(tmp_path, layout.embedding_group(spec))["tokens.weight"]
    assert torch.equal(tokens, model.get_input_embeddings().weight)


def _rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    """Set or drop tensors of a checkpoint."""
    file = directory / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({UP: None}, f"lacks 1 tensors .*{UP}"),
        ({UP: torch.zeros(47, 32)}, rf"'{UP}' has shape \[47, 32\], config.json needs \[48, 32\]"),
        ({UP: torch.zeros(48, 32, dtype=torch.int8)}, "floating point"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, "does not use: .*q_proj.bias"),
        ({"model.layers.2.input_layernorm.weight": torch.zeros(32)}, "of 2 layers .*layers.2.input_layernorm"),
        ({"model.layers.0.mlp.experts.weight": torch.zeros(3)}, "experts"),
        ({"lm_head.bias": torch.zeros(96)}, "lm_head.bias"),
        ({"model.embed_tokens.weight": None}, "this one has none"),
    ],
)
def test_a_checkpoint_unlike_its_config_is_refused(llama: Path, changes: dict, says: str) -> None:
    _rewrite(llama, **changes)
    with pytest.raises(CheckpointError, match=says):
        check(Checkpoint(llama), ModelSpec.from_directory(llama))


def test_a_bias_that_only_the_config_has_is_refused(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    with pytest.raises(CheckpointError, match=r"lacks 8 tensors .*q_proj\.bias.* and 5 more"):
        check(Checkpoint(llama), ModelSpec.from_directory(llama))


def test_old_buffers_and_a_spare_tied_head_are_harmless(tmp_path: Path) -> None:
    model_of("llama-tied").save_pretrained(tmp_path)
    _rewrite(
        tmp_path,
        **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4), "lm_head.weight": torch.zeros(96, 32)},
    )
    check(Checkpoint(tmp_path), ModelSpec.from_directory(tmp_path))


def test_layout_and_store_need_no_torch() -> None:
    code = "import sys, engine.checkpoint.layout, engine.checkpoint.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
