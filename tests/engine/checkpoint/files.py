"""Makes tiny safetensors files, sound and broken, and tiny random models of each family."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers


def raw(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file with this header (an object, or the header's own bytes) and these data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2,), begin: int = 0, end: int = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
LLAMA_LIKE = COMMON | {"intermediate_size": 48, "num_key_value_heads": 2}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**LLAMA_LIKE),
    "llama-biased": transformers.LlamaConfig(**LLAMA_LIKE, attention_bias=True, mlp_bias=True),
    "llama-tied": transformers.LlamaConfig(**LLAMA_LIKE, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**LLAMA_LIKE),
    "qwen2": transformers.Qwen2Config(**LLAMA_LIKE),
    "qwen3": transformers.Qwen3Config(**LLAMA_LIKE, head_dim=16),
    "opt": transformers.OPTConfig(**COMMON, ffn_dim=48, word_embed_proj_dim=32),
}


def model_of(family: str) -> transformers.PreTrainedModel:
    """A random model with no two parameters alike, biases and norms included."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(CONFIGS[family])
    ).eval()  # a saved model notes its type in its config
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model
