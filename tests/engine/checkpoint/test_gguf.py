"""GGUF import: the model computes what the original computed, and what cannot be imported leaves nothing behind."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from benchmarks.random_model import byte_tokenizer
from engine.checkpoint.gguf import import_gguf
from engine.errors import CheckpointError, HeliosError, UnsupportedModelError
from engine.spec import ModelSpec
from tests.engine.sweeps import Bench
from tests.engine.tiny import CONFIGS, save_tiny

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def write_gguf(directory: Path, file: Path, architecture: str = "llama") -> None:
    """A tiny Llama as llama.cpp's converter writes it: pairs of rotated rows side by side."""
    config = CONFIGS["llama"]
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    vocabulary = byte_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens += [f"<unused{i}>" for i in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(tokens))])
    merges = json.loads(byte_tokenizer().backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(_gguf_name(name), _pairs_beside(name, tensor, config).numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    if name in TOP or name == "lm_head.weight":
        return TOP.get(name, "output.weight")
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def _pairs_beside(name: str, tensor: torch.Tensor, config: object) -> torch.Tensor:
    if "q_proj" not in name and "k_proj" not in name:
        return tensor
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads  # type: ignore[attr-defined]
    halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
    return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("original"), "llama")


def test_an_imported_model_computes_what_the_original_does(original: Path, tmp_path: Path) -> None:
    write_gguf(original, tmp_path / "tiny.gguf")
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "imported", dtype="float32")
    tokens = list(range(5, 60))
    expected = Bench(original).logits(tokens)
    assert torch.allclose(Bench(tmp_path / "imported").logits(tokens), expected, atol=1e-5)
    assert ModelSpec.from_directory(tmp_path / "imported").eos_ids == (2,)


def test_an_architecture_that_is_not_supported_is_refused_by_name(original: Path, tmp_path: Path) -> None:
    write_gguf(original, tmp_path / "other.gguf", "mamba")
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported"):
        import_gguf(tmp_path / "other.gguf", tmp_path / "imported")
    assert [path.name for path in tmp_path.iterdir()] == ["other.gguf"]


@pytest.mark.parametrize("share", [0.01, 0.5, 0.95])
def test_a_truncated_file_is_refused_and_nothing_is_left(original: Path, tmp_path: Path, share: float) -> None:
    whole, cut = tmp_path / "whole.gguf", tmp_path / "cut.gguf"
    write_gguf(original, whole)
    content = whole.read_bytes()
    cut.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(HeliosError, match=r"cut\.gguf"):
        import_gguf(cut, tmp_path / "imported")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.gguf", "whole.gguf"]


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(CheckpointError, match="is no GGUF file"):
        import_gguf(tmp_path / "text.gguf", tmp_path / "imported")
