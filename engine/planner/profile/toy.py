"""Llama-shaped models to measure with: as a config alone, or a tiny random one as a directory that an engine loads."""

import json
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.layout import all_groups
from ...checkpoint.writer import write_safetensors
from ...spec import ModelSpec

VOCABULARY = 256
CONTEXT = 64
HIDDEN = 64
WEIGHTS_FILE = "model.safetensors"


def llama_config(hidden: int, n_heads: int, n_kv_heads: int, n_layers: int = 1) -> dict[str, Any]:
    """A Hugging Face config with an MLP four times as wide as the hidden states."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def llama_spec(hidden: int, n_heads: int, n_kv_heads: int) -> ModelSpec:
    """The shapes of one layer."""
    return ModelSpec.from_config(llama_config(hidden, n_heads, n_kv_heads))


def save_toy(directory: Path, n_layers: int) -> Path:
    """Write a model so small that its products cost nothing, with a tokenizer of VOCABULARY words; returns it."""
    directory.mkdir()
    config = llama_config(HIDDEN, n_heads=4, n_kv_heads=2, n_layers=n_layers)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    groups = all_groups(ModelSpec.from_config(config))
    shapes = {part.source: part.shape for group in groups for fused in group for part in fused.parts}
    generator = torch.Generator().manual_seed(0)
    pieces = (0.1 * torch.randn(shape, generator=generator) for shape in shapes.values())  # float16 holds the sums too
    write_safetensors(directory / WEIGHTS_FILE, shapes, torch.float32, pieces)
    _save_tokenizer(directory)
    return directory


def _save_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast  # takes seconds; an engine's tokenizer needs it anyway

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(directory)
