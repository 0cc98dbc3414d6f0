"""Writes a tiny model as GGUF in the way llama.cpp's converter does: query and key rows reordered, names its own."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from .files import model_of

BYTES = [chr(code) for code in range(33, 127)][:90]
TOKENS = [*BYTES, "<|end|>", "<|turn|>", "<|a|>", "<|b|>", "<|c|>", "ab"]
EOS, EOT = 90, 91
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, family: str, quantise: bool = True, **metadata: Any) -> transformers.PreTrainedModel:
    """Write the family's tiny model in fp32 (if told to quantise, MLP matrices with rows of 32 in Q8_0) and return it.

    ``metadata`` adds or replaces keys of the architecture; "rope_freqs" adds that tensor.
    """
    model = model_of(family)
    config, architecture = model.config, model.config.model_type
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if "rope.freq_base" not in metadata:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_tokenizer(writer)
    factors = metadata.pop("rope_freqs", None)
    for key, value in metadata.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{architecture}.{key}", value)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(factors, dtype=np.float32))
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            _add_tensor(writer, name, tensor, config, quantise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types(
        [gguf.TokenType.NORMAL] * len(BYTES) + [gguf.TokenType.CONTROL] * 5 + [gguf.TokenType.NORMAL]
    )
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(EOS)
    writer.add_eos_token_id(EOS)
    writer.add_eot_token_id(EOT)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, config: Any, quantise: bool) -> None:
    value = tensor.numpy()
    for head, count in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        if config.model_type == "llama" and f"{head}.weight" in name:
            value = value.reshape(count, 2, -1, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
    value = np.ascontiguousarray(value)
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, stem = stem.removeprefix("model.layers.").split(".", 1)
        target = f"blk.{layer}.{NAMES[stem]}.{kind}"
    else:
        target = f"{NAMES[stem]}.{kind}"
    if quantise and value.ndim == 2 and value.shape[1] == 32 and "mlp" in name:
        kind8 = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(target, gguf.quantize(value, kind8), raw_dtype=kind8)
    else:
        writer.add_tensor(target, value)
