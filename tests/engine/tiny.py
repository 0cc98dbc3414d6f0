"""Tiny random models of every supported family, saved as Hugging Face directories, with transformers as the oracle."""

from pathlib import Path
from typing import Any

from transformers import LlamaConfig, MistralConfig, OPTConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from benchmarks.random_model import save_random

VOCAB = 320
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED: dict[str, Any] = {**_SHAPE, "intermediate_size": 96, "num_key_value_heads": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_GATED),
    "llama-multi-head": LlamaConfig(**{**_GATED, "num_key_value_heads": 4}),
    "llama-one-kv-head-tied": LlamaConfig(**{**_GATED, "num_key_value_heads": 1}, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(**_GATED, attention_bias=True, mlp_bias=True),
    "llama-wide-heads": LlamaConfig(**_GATED, head_dim=32),
    "llama3-rope": LlamaConfig(**_GATED, rope_parameters=LLAMA3_ROPE),
    "code-llama-theta": LlamaConfig(**_GATED, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "llama-linear-rope": LlamaConfig(
        **_GATED, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "mistral": MistralConfig(**_GATED, sliding_window=None),
    "mistral-window": MistralConfig(**_GATED, sliding_window=24),
    "qwen2": Qwen2Config(**_GATED, tie_word_embeddings=True),
    "qwen2-window": Qwen2Config(**_GATED, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen2-yarn": Qwen2Config(**_GATED, rope_parameters=YARN_ROPE),
    "qwen3": Qwen3Config(**_GATED, head_dim=24),
    "qwen3-biases": Qwen3Config(**_GATED, head_dim=16, attention_bias=True, tie_word_embeddings=True),
    "opt": OPTConfig(**_SHAPE, ffn_dim=96, word_embed_proj_dim=64),
    "opt-gelu-no-bias": OPTConfig(
        **_SHAPE, ffn_dim=96, word_embed_proj_dim=64, activation_function="gelu", enable_bias=False
    ),
}


def save_tiny(directory: Path, name: str = "llama", seed: int = 0) -> Path:
    """Write the tiny random model of that name and a byte-level tokenizer into ``directory``; returns it."""
    return save_random(directory, CONFIGS[name], seed)
