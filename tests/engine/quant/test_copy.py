"""A quantised copy has the model's codes and everything else of its directory; what cannot be copied leaves nothing."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from engine.checkpoint.index import QUANTISED_FILE, Checkpoint
from engine.checkpoint.store import Origin, read_origin, write_origin
from engine.errors import CheckpointError, ConfigError, HeliosError
from engine.quant import copy as copy_module
from engine.quant.copy import quantise_model
from engine.quant.format import Quantisation, stored_names
from engine.quant.groups import Quantised, dequantise, quantise
from engine.quant.scheme import Scheme
from engine.spec import ModelSpec
from tests.engine.checkpoint.files import model_of

SCHEME = Scheme(4, 16)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny model in bf16."""
    model_of("llama-biased").bfloat16().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "copy"


@pytest.mark.parametrize("piece_elements", [copy_module.PIECE_ELEMENTS, 100])
@pytest.mark.parametrize("scheme", [SCHEME, Scheme(4, 8, "output"), Scheme(8, None)], ids=Scheme.describe)
def test_the_tensors_are_the_models_quantised_whole(
    source: Path, target: Path, scheme: Scheme, piece_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_module, "PIECE_ELEMENTS", piece_elements)
    copied = quantise_model(source, target, Quantisation(scheme))
    original, stored = load_file(source / "model.safetensors"), load_file(target / QUANTISED_FILE)
    quantised = [name for name in original if name.endswith("_proj.weight")]
    assert len(quantised) == 14
    for name in quantised:
        q = quantise(original.pop(name), scheme)
        codes, scale, minimum = (stored.pop(part) for part in stored_names(name))
        assert torch.equal(codes, q.codes), name
        assert torch.equal(scale, q.scale), name
        assert torch.equal(minimum, q.minimum), name
    assert stored.keys() == original.keys()
    assert all(torch.equal(stored[name], original[name]) for name in original)
    assert copied.copy_bytes == Checkpoint(target).nbytes
    assert copied.source_bytes == Checkpoint(source).nbytes


def test_the_lm_head_is_quantised_when_asked_for(source: Path, target: Path) -> None:
    quantise_model(source, target, Quantisation(SCHEME, lm_head=True))
    head = load_file(source / "model.safetensors")["lm_head.weight"]
    stored = load_file(target / QUANTISED_FILE)
    parts = [stored[name] for name in stored_names("lm_head.weight")]
    q = Quantised(parts[0], parts[1], parts[2], tuple(head.shape), SCHEME)  # 96 rows: a block and a half
    assert torch.equal(dequantise(q), dequantise(quantise(head, SCHEME)))
    assert Quantisation.of(target) == Quantisation(SCHEME, lm_head=True)


def test_a_tied_lm_head_is_refused(tmp_path: Path, target: Path) -> None:
    model_of("llama-tied").save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="token embedding, which stays in 16 bits"):
        quantise_model(tmp_path / "model", target, Quantisation(SCHEME, lm_head=True))
    assert not list(target.parent.iterdir())


def test_what_is_not_quantised_in_fp32_becomes_bf16(tmp_path: Path, target: Path) -> None:
    model_of("opt").save_pretrained(tmp_path / "model")
    quantise_model(tmp_path / "model", target, Quantisation(SCHEME))
    types = {name.rsplit(".", 1)[1]: tensor.dtype for name, tensor in load_file(target / QUANTISED_FILE).items()}
    assert types == {
        "weight": torch.bfloat16,
        "bias": torch.bfloat16,
        "codes": torch.uint8,
        "scale": torch.float16,
        "minimum": torch.float16,
    }
    assert ModelSpec.from_directory(target).dtype == "bfloat16"


def test_a_matrix_beyond_fp16_has_its_scales_in_bf16_and_others_do_not(tmp_path: Path, target: Path) -> None:
    model = model_of("llama").bfloat16()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[-1] *= 1e6
    model.save_pretrained(tmp_path / "model")
    quantise_model(tmp_path / "model", target, Quantisation(SCHEME))
    stored = load_file(target / QUANTISED_FILE)
    for layer, expected in ((0, torch.float16), (1, torch.bfloat16)):
        names = stored_names(f"model.layers.{layer}.mlp.up_proj.weight")
        assert [stored[name].dtype for name in names[1:]] == [expected] * 2


def test_texts_are_copied_and_the_origin_noted(source: Path, target: Path) -> None:
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors.index.json").write_text("{}")
    write_origin(source, Origin("hub a/b", "MIT"))
    quantise_model(source, target, Quantisation(SCHEME))
    names = {path.name for path in target.iterdir()}
    assert names == {"config.json", "generation_config.json", "helios.json", "tokenizer.json", QUANTISED_FILE}
    assert read_origin(target) == Origin("hub a/b, 4 bits, groups of 16 along the input", "MIT")
    config = json.loads((source / "config.json").read_text())
    entry = Quantisation(SCHEME).to_json()
    assert json.loads((target / "config.json").read_text()) == config | {"helios_quantization": entry}


def test_progress_counts_every_element(source: Path, target: Path) -> None:
    seen: list[tuple[int, int]] = []
    quantise_model(source, target, Quantisation(SCHEME), lambda done, total: seen.append((done, total)))
    total = sum(tensor.numel() for tensor in load_file(source / "model.safetensors").values())
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


@pytest.mark.parametrize("renamed", ["config-class", "auto-class"])
def test_transformers_refuses_a_copy(source: Path, target: Path, renamed: str) -> None:
    quantise_model(source, target, Quantisation(SCHEME))
    cls = transformers.LlamaForCausalLM if renamed == "config-class" else transformers.AutoModelForCausalLM
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        cls.from_pretrained(target)


def test_groups_that_do_not_divide_a_matrix_leave_nothing(source: Path, target: Path) -> None:
    with pytest.raises(ConfigError, match=r"q_proj\.weight has 32 elements along its input.*groups of 64"):
        quantise_model(source, target, Quantisation(Scheme()))
    with pytest.raises(ConfigError, match=r"k_proj\.weight has 16 elements along its output"):
        quantise_model(source, target, Quantisation(Scheme(4, 32, "output")))
    assert not list(target.parent.iterdir())


def test_values_that_are_not_finite_leave_nothing(tmp_path: Path, target: Path) -> None:
    model = model_of("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 3] = float("nan")
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight' has values that are not finite"):
        quantise_model(tmp_path / "model", target, Quantisation(SCHEME))
    assert not list(target.parent.iterdir())


def test_an_interrupt_leaves_nothing(source: Path, target: Path) -> None:
    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantise_model(source, target, Quantisation(SCHEME), interrupt)
    assert not list(target.parent.iterdir())


def test_a_copy_is_not_copied_again_nor_overwritten(source: Path, target: Path) -> None:
    quantise_model(source, target, Quantisation(SCHEME))
    with pytest.raises(ConfigError, match="quantised already"):
        quantise_model(target, target.with_name("again"), Quantisation(SCHEME))
    with pytest.raises(HeliosError, match="there already"):
        quantise_model(source, target, Quantisation(SCHEME))
    quantise_model(source, target, Quantisation(Scheme(8, 16)), replace=True)
    assert Quantisation.of(target) == Quantisation(Scheme(8, 16))


def test_a_full_disk_is_noticed_before_anything_is_written(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = copy_module.shutil.disk_usage(source)
    monkeypatch.setattr(copy_module.shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(HeliosError, match="1000 B left"):
        quantise_model(source, target, Quantisation(SCHEME))
    assert not list(target.parent.iterdir())
