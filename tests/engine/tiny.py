"""Tiny random models of every supported family, saved as Hugging Face directories, with transformers as the oracle."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

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
    """Write a tiny random model and a byte-level tokenizer into ``directory``; returns it.

    Norms and biases are random too, so that none of them can be left out unnoticed.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)  # far enough from uniform logits that argmaxes mean something
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over ``VOCAB`` ids with <unk>, <bos> and <eos> and a chat template."""
    fast = FastTokenizer(models.BPE(unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<unk>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 4, "hello world, hello there"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=(
            "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        ),
    )
