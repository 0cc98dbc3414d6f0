"""What a GGUF file says of its model, as a Hugging Face config. What cannot be expressed is refused by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, UnsupportedModelError

MAGIC = b"GGUF"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""GGUF architectures (Mistral's is llama) and the transformers class of each."""
ROPE_FREQS = "rope_freqs.weight"
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every Llama 3 has; the file keeps only the frequency factors that follow from it and from ``factor``."""


class GgufFile:
    """The metadata and tensor table of a GGUF file. The tensors' bytes are mapped and read only when converted.

    Raises CheckpointError for a missing or damaged file, or one of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_magic(path)
        from gguf import GGUFReader

        try:
            self._reader = GGUFReader(str(path))
            self.architecture = str(self._value("general.architecture"))
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            size = path.stat().st_size
            raise CheckpointError(
                f"{path} ({size} bytes) is truncated or damaged: {error}; download it again"
            ) from error
        # The frequency factors become part of the config and are no tensor of a Hugging Face checkpoint.
        self.tensors = [tensor for tensor in self._reader.tensors if tensor.name != ROPE_FREQS]
        self.by_name = {tensor.name: tensor for tensor in self._reader.tensors}

    def _value(self, key: str) -> Any:
        return self._reader.fields[key].contents()

    def get(self, key: str) -> Any:
        """A metadata value by its whole key, None if it is absent."""
        return self._value(key) if key in self._reader.fields else None

    def integer(self, key: str, default: int | None = None) -> int:
        """A number of this architecture, by the key without it. Raises CheckpointError if absent without default."""
        value = self.get(f"{self.architecture}.{key}")
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if value is None:
            value = default
        if not isinstance(value, (int, np.integer)):
            raise CheckpointError(f"{self.path}: '{self.architecture}.{key}' is {value}; it must be one number")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """As ``integer`` for fp32 values, in their shortest decimal form: 1e-05 and not 9.999999747378752e-06."""
        value = self.get(f"{self.architecture}.{key}")
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.path} has no '{self.architecture}.{key}'")
        return float(str(np.float32(value)))


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if magic != MAGIC:
        raise CheckpointError(f"{path} is no GGUF file: it starts with {magic!r}, not {MAGIC!r}")


def open_gguf(path: Path) -> GgufFile:
    """A GGUF file that the engine can import. Raises CheckpointError as GgufFile, UnsupportedModelError by feature."""
    gguf = GgufFile(path)
    _refuse_unsupported(gguf)
    return gguf


def _refuse_unsupported(gguf: GgufFile) -> None:
    name = gguf.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{gguf.path}: GGUF architecture '{name}' is not supported; the engine imports {', '.join(ARCHITECTURES)}"
        )
    if gguf.get(f"{name}.expert_count"):
        raise UnsupportedModelError(f"{gguf.path}: mixtures of experts are not supported")
    if name == "llama" and "blk.0.attn_q.bias" in gguf.by_name:
        raise UnsupportedModelError(f"{gguf.path}: a Llama with biases on query and key cannot be imported from GGUF")
    head_dim = _head_dim(gguf)
    rotated = gguf.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModelError(f"{gguf.path}: only {rotated} of {head_dim} dimensions of a head are rotated")
    _rope(gguf)


def config_of(gguf: GgufFile) -> dict[str, Any]:
    """``config.json`` of the model, without its dtype."""
    architecture = gguf.architecture
    heads = gguf.integer("attention.head_count")
    window = gguf.get(f"{architecture}.attention.sliding_window")
    sliding = architecture == "llama" and window is not None
    config: dict[str, Any] = {
        "architectures": ["MistralForCausalLM" if sliding else ARCHITECTURES[architecture]],
        "model_type": "mistral" if sliding else architecture,
        "hidden_size": gguf.integer("embedding_length"),
        "intermediate_size": gguf.integer("feed_forward_length"),
        "num_hidden_layers": gguf.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.integer("attention.head_count_kv", heads),
        "head_dim": _head_dim(gguf),
        "vocab_size": _vocabulary(gguf),
        "max_position_embeddings": gguf.integer("context_length"),
        "hidden_act": "silu",
        "rms_norm_eps": gguf.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(gguf),
        "tie_word_embeddings": "output.weight" not in gguf.by_name,
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.get("tokenizer.ggml.eos_token_id"),
    }
    if sliding:
        config["sliding_window"] = int(window)
    return config


def generation_config_of(gguf: GgufFile, extra_eos_ids: Sequence[int]) -> dict[str, Any]:
    """``generation_config.json``: the end-of-sequence and end-of-turn ids the file names, then the extra ones."""
    named = (gguf.get("tokenizer.ggml.eos_token_id"), gguf.get("tokenizer.ggml.eot_token_id"))
    ids = list(dict.fromkeys(int(i) for i in (*named, *extra_eos_ids) if i is not None))
    padding = gguf.get("tokenizer.ggml.padding_token_id")
    return {
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
        "pad_token_id": padding,
    }


def _head_dim(gguf: GgufFile) -> int:
    whole = gguf.integer("embedding_length") // gguf.integer("attention.head_count")
    return gguf.integer("attention.key_length", whole)


def _vocabulary(gguf: GgufFile) -> int:
    if "token_embd.weight" not in gguf.by_name:
        raise CheckpointError(f"{gguf.path} has no tensor 'token_embd.weight'")
    return int(gguf.by_name["token_embd.weight"].shape[1])  # GGUF lists the innermost size first


def _rope(gguf: GgufFile) -> dict[str, Any]:
    theta = gguf.number("rope.freq_base", 10000.0)
    kind = gguf.get(f"{gguf.architecture}.rope.scaling.type") or "none"
    if ROPE_FREQS in gguf.by_name:
        return {"rope_type": "llama3", "rope_theta": theta} | _llama3(gguf, theta)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"{gguf.path}: rope scaling '{kind}' is not supported; linear and yarn are")
    scaling = {"rope_type": kind, "rope_theta": theta, "factor": gguf.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = gguf.integer("rope.scaling.original_context_length")
    return scaling


def _llama3(gguf: GgufFile, theta: float) -> dict[str, float]:
    """The llama3 parameters behind the file's frequency factors. Refuses factors that no published Llama 3 has."""
    given = np.asarray(gguf.by_name[ROPE_FREQS].data, dtype=np.float64).reshape(-1)
    parameters = LLAMA3_ROPE | {"factor": float(given.max())}
    if not np.allclose(given, _llama3_factors(parameters, theta, _head_dim(gguf)), rtol=1e-3):
        raise UnsupportedModelError(f"{gguf.path}: the factors in '{ROPE_FREQS}' are not those of a Llama 3 rope")
    return parameters


def _llama3_factors(parameters: dict[str, float], theta: float, head_dim: int) -> np.ndarray[Any, np.dtype[Any]]:
    """What each frequency is divided by: 1 for short wavelengths, ``factor`` for long ones, blended in between."""
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    share = (parameters["original_max_position_embeddings"] / wavelength - low) / (high - low)
    share = share.clip(0, 1)  # of the unscaled frequency
    return 1 / ((1 - share) / parameters["factor"] + share)
