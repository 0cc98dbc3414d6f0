"""What the entries of a Hugging Face config may be, checked once before anything is made of them.

Absent entries are the reader's business (``spec.py``): it knows which ones a family needs.
"""

from collections.abc import Callable, Mapping
from typing import Any

from .errors import CheckpointError
from .numbers import is_number

MAX_LAYERS = 4096
MAX_SIZE = 2**24
"""Of a width or a vocabulary: token ids must be exact in float32."""
MAX_POSITIONS = 2**30

Check = Callable[[Any], bool]


def _integer(least: int, most: int) -> tuple[Check, str]:
    return lambda value: type(value) is int and least <= value <= most, f"an integer from {least} to {most}"


_SIZE = _integer(1, MAX_SIZE)
_POSITIONS = _integer(1, MAX_POSITIONS)
_POSITIVE: tuple[Check, str] = (lambda value: is_number(value) and value > 0, "a number above 0")
_NOT_NEGATIVE: tuple[Check, str] = (lambda value: is_number(value) and value >= 0, "a number of at least 0")
_AT_LEAST_1: tuple[Check, str] = (lambda value: is_number(value) and value >= 1, "a number of at least 1")
_FLAG: tuple[Check, str] = (lambda value: isinstance(value, bool), "true or false")
_TEXT: tuple[Check, str] = (lambda value: isinstance(value, str), "a string")
_OBJECT: tuple[Check, str] = (lambda value: isinstance(value, Mapping), "an object")

ENTRIES: Mapping[str, tuple[Check, str]] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "ffn_dim", "word_embed_proj_dim", "vocab_size"), _SIZE),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), _SIZE),
    "num_hidden_layers": _integer(1, MAX_LAYERS),
    "max_window_layers": _integer(0, MAX_LAYERS),
    "max_position_embeddings": _POSITIONS,
    "sliding_window": _POSITIONS,
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "partial_rotary_factor"), _POSITIVE),
    **dict.fromkeys(("attention_bias", "mlp_bias", "enable_bias", "tie_word_embeddings", "use_sliding_window"), _FLAG),
    **dict.fromkeys(("do_layer_norm_before", "_remove_final_layer_norm", "layer_norm_elementwise_affine"), _FLAG),
    **dict.fromkeys(("hidden_act", "activation_function", "dtype", "torch_dtype"), _TEXT),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "quantization_config"), _OBJECT),
    "layer_types": (lambda value: isinstance(value, list), "a list"),
}
ROPE_ENTRIES: Mapping[str, tuple[Check, str]] = {
    "factor": _AT_LEAST_1,
    "original_max_position_embeddings": _POSITIONS,
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "attention_factor"), _POSITIVE),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), _POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _NOT_NEGATIVE),
    **dict.fromkeys(("rope_type", "type"), _TEXT),
}
ROPE_NEEDS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
"""What a type of scaling cannot do without."""


def check_config(config: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
    """Check ``config.json`` and the end-of-sequence ids of both files.

    Raises CheckpointError that names the file, the entry, its value and what is allowed.
    """
    _check("config.json", "", config, ENTRIES)
    for name in ("rope_parameters", "rope_scaling"):
        _check_rope(name, config.get(name) or {})
    _check_heads(config)
    for file, entries in (("config.json", config), ("generation_config.json", generation)):
        _check_eos(file, entries.get("eos_token_id"), config.get("vocab_size"))


def _check(file: str, where: str, entries: Mapping[str, Any], rules: Mapping[str, tuple[Check, str]]) -> None:
    for key, (allows, wanted) in rules.items():
        value = entries.get(key)
        if value is not None and not allows(value):
            raise _wrong(file, where + key, value, wanted)


def _check_rope(name: str, given: Mapping[str, Any]) -> None:
    _check("config.json", f"{name}.", given, ROPE_ENTRIES)
    kind = given.get("rope_type") or given.get("type") or "default"
    for key in ROPE_NEEDS.get(kind, ()):
        if given.get(key) is None:
            raise CheckpointError(f"config.json: {name} lacks '{key}', which the type '{kind}' needs")
    low, high = given.get("low_freq_factor"), given.get("high_freq_factor")
    if kind == "llama3" and low is not None and high is not None and low >= high:
        raise _wrong("config.json", f"{name}.high_freq_factor", high, f"above low_freq_factor, {low}")


def _check_heads(config: Mapping[str, Any]) -> None:
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if hidden is None or heads is None:
        return
    if not config.get("head_dim") and config.get("model_type") != "qwen3" and hidden % heads:
        raise _wrong("config.json", "num_attention_heads", heads, f"a divisor of hidden_size, {hidden}")
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise _wrong("config.json", "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, {heads}")


def _check_eos(file: str, given: Any, vocab_size: int | None) -> None:
    allows, wanted = _integer(0, (vocab_size or MAX_SIZE) - 1)
    for token_id in given if isinstance(given, list) else [] if given is None else [given]:
        if not allows(token_id):
            raise _wrong(file, "eos_token_id", given, f"{wanted} (the vocabulary), or a list of such")


def _wrong(file: str, key: str, value: Any, wanted: str) -> CheckpointError:
    shown = repr(value)
    return CheckpointError(f"{file}: {key} is {shown[:80]}{'…' * (len(shown) > 80)}; it must be {wanted}")
