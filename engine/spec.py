"""ModelSpec: everything the engine knows about an architecture, as data, read from a Hugging Face config.

A feature the decoder block does not implement is refused here by name; nothing in a config is ignored silently
that would change the output.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from .errors import CheckpointError, UnsupportedModelError
from .hf_config import check_config

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "opt")
RopeType = Literal["default", "linear", "llama3", "yarn"]
ROPE_TYPES = get_args(RopeType)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions (Su et al., 2021) and their scaling. ``params`` are the config's own numbers for ``type``."""

    theta: float
    type: RopeType = "default"
    params: tuple[tuple[str, float], ...] = ()

    def param(self, name: str, default: float | None = None) -> float:
        """A scaling parameter. Raises UnsupportedModelError if it is absent and has no default."""
        for key, value in self.params:
            if key == name:
                return value
        if default is None:
            raise UnsupportedModelError(f"rope type '{self.type}' needs '{name}' in the config's rope parameters")
        return default


ExitKind = Literal["shared", "norm", "adapter", "block"]
"""What a head has before the LM head: the model's own final norm; a norm of its own; that and an adapter; that after a
decoder block of its own."""
EXIT_KINDS: tuple[ExitKind, ...] = get_args(ExitKind)


@dataclass(frozen=True, slots=True)
class Exit:
    """A point where tokens may leave the model, and its head."""

    layer: int
    """Layers of the trunk below it."""
    kind: ExitKind = "shared"
    adapter_size: int = 0
    """Width of an adapter's gated MLP."""
    threshold: float | None = None
    """Confidence from which on it agrees with the last layer as often as it was calibrated to; None if it was not."""
    margin_threshold: float | None = None
    """Likewise, where confidence is the lead over the second best."""

    def calibrated(self, confidence: str) -> float | None:
        """The threshold for a measure of ``config.CONFIDENCES``."""
        return self.margin_threshold if confidence == "margin" else self.threshold


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and features of a decoder-only transformer. Sizes are in elements."""

    architecture: str
    n_layers: int
    hidden_size: int
    mlp_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """Longest sequence, prompt and output together."""
    norm: Literal["rms", "layer"]
    norm_eps: float
    activation: Literal["silu", "relu", "gelu", "gelu_tanh"]
    gated_mlp: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMS norm on each query and key head before the rotation (Qwen3)."""
    tied: bool
    """The LM head is the token embedding."""
    rope: RopeSpec | None
    """None: learned absolute positions."""
    position_offset: int = 0
    """Rows at the start of the learned position table that stand for no position (OPT: 2)."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer, in positions including the current one; None attends to everything."""
    eos_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """The checkpoint's own type, as torch names it."""
    exits: tuple[Exit, ...] = ()
    """Where tokens may leave, by layer."""
    adapter_size: int = 0
    """Width of the adapter that the head begins with; 0 without one."""

    @property
    def q_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V that one position takes in one layer."""
        return 2 * self.kv_size

    def at(self, end: Exit) -> "ModelSpec":
        """The model that ends at an exit: a head's own block is its last layer, with the window of the one there."""
        return replace(self.cut(end.layer + (end.kind == "block")), adapter_size=end.adapter_size)

    def cut(self, n_layers: int) -> "ModelSpec":
        """Only the first layers of it."""
        return replace(self, n_layers=n_layers, windows=self.windows[:n_layers])

    @classmethod
    def from_directory(cls, directory: Path) -> "ModelSpec":
        """Read ``config.json`` (and the end-of-sequence ids of ``generation_config.json``) of a model directory.

        Raises CheckpointError when there is no readable config, UnsupportedModelError for what the engine lacks.
        """
        config = read_json(directory / "config.json")
        generation = directory / "generation_config.json"
        try:
            return cls.from_config(config, read_json(generation) if generation.exists() else {})
        except (CheckpointError, UnsupportedModelError) as error:
            raise type(error)(f"{directory}: {error}") from None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "ModelSpec":
        """Build the spec of a Hugging Face config given as a dictionary. Raises as ``from_directory``."""
        family = config.get("model_type")
        if family not in SUPPORTED:
            raise UnsupportedModelError(
                f"model_type '{family}' is not supported; the engine runs {', '.join(SUPPORTED)}"
            )
        check_config(config, generation or {})
        if config.get("quantization_config"):
            method = config["quantization_config"].get("quant_method", "unknown")
            raise UnsupportedModelError(
                f"the checkpoint is quantised with '{method}'; use the model's unquantised safetensors or its GGUF"
            )
        try:
            spec = _opt(config) if family == "opt" else _llama_like(str(family), config)
        except KeyError as missing:
            raise CheckpointError(f"config.json of this '{family}' model lacks {missing}") from None
        return _with_eos(spec, config, generation or {})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError that names the file and what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; a model directory needs config.json and safetensors") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def _llama_like(family: str, config: Mapping[str, Any]) -> ModelSpec:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    layers = int(config["num_hidden_layers"])
    attention_bias = family in ("llama", "qwen3") and bool(config.get("attention_bias", False))
    return ModelSpec(
        architecture=family,
        n_layers=layers,
        hidden_size=hidden,
        mlp_size=int(config["intermediate_size"]),
        n_heads=heads,
        n_kv_heads=int(
            (config.get("num_key_value_heads") or heads) if family == "llama" else config["num_key_value_heads"]
        ),
        head_dim=int(config.get("head_dim") or (128 if family == "qwen3" else hidden // heads)),
        vocab_size=int(config["vocab_size"]),
        max_positions=int(config["max_position_embeddings"]),
        norm="rms",
        norm_eps=float(config["rms_norm_eps"]),
        activation=_activation(config["hidden_act"]),
        gated_mlp=True,
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=attention_bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
        rope=_rope(config),
        windows=_windows(family, config, layers),
        dtype=_dtype(config),
    )


def _opt(config: Mapping[str, Any]) -> ModelSpec:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    if not config.get("do_layer_norm_before", True):
        raise UnsupportedModelError("OPT with do_layer_norm_before=false (OPT-350m) is not supported")
    if int(config.get("word_embed_proj_dim") or hidden) != hidden:
        raise UnsupportedModelError(
            f"OPT with word_embed_proj_dim={config['word_embed_proj_dim']} unlike hidden_size={hidden} is not supported"
        )
    if config.get("_remove_final_layer_norm", False):
        raise UnsupportedModelError("OPT with _remove_final_layer_norm=true is not supported")
    if not config.get("layer_norm_elementwise_affine", True):
        raise UnsupportedModelError("OPT with layer_norm_elementwise_affine=false is not supported")
    bias = bool(config.get("enable_bias", True))
    return ModelSpec(
        architecture="opt",
        n_layers=int(config["num_hidden_layers"]),
        hidden_size=hidden,
        mlp_size=int(config["ffn_dim"]),
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=int(config["vocab_size"]),
        max_positions=int(config["max_position_embeddings"]),
        norm="layer",
        norm_eps=1e-5,
        activation=_activation(config.get("activation_function", "relu")),
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        qk_norm=False,
        tied=bool(config.get("tie_word_embeddings", True)),
        rope=None,
        position_offset=2,
        windows=(None,) * int(config["num_hidden_layers"]),
        dtype=_dtype(config),
    )


def _activation(name: str) -> Literal["silu", "relu", "gelu", "gelu_tanh"]:
    known: dict[str, Literal["silu", "relu", "gelu", "gelu_tanh"]] = {
        "silu": "silu",
        "swish": "silu",
        "relu": "relu",
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
    }
    if name not in known:
        raise UnsupportedModelError(f"activation '{name}' is not supported; the engine has {', '.join(known)}")
    return known[name]


def _dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def _rope(config: Mapping[str, Any]) -> RopeSpec:
    """transformers 5 writes ``rope_parameters``; older configs ``rope_theta`` and ``rope_scaling``."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    _must_agree(given, config.get("rope_scaling"))
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(f"rope type '{kind}' is not supported; the engine has {', '.join(ROPE_TYPES)}")
    theta = given.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    partial = given.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    if float(partial) != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor={partial} is not supported; the engine rotates whole heads")
    numbers = {key: float(value) for key, value in given.items() if isinstance(value, (int, float))}
    nested = sorted(set(given) - set(numbers) - {key for key, value in given.items() if value is None})
    if nested:
        raise UnsupportedModelError(f"rope parameters {', '.join(nested)} of type '{kind}' are not supported")
    if kind == "yarn":
        numbers.setdefault("original_max_position_embeddings", float(config["max_position_embeddings"]))
    return RopeSpec(theta=float(theta), type=cast(RopeType, kind), params=tuple(sorted(numbers.items())))


def _must_agree(parameters: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> None:
    """A config with both says the same in both, or leaves open which is meant."""
    if scaling and _plain(scaling) != _plain(parameters):
        raise UnsupportedModelError(
            f"config.json has both rope_parameters {dict(parameters)} and rope_scaling {dict(scaling)}, which differ; "
            "remove the one that is not meant"
        )


def _plain(rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    names = ("type", "rope_type", "rope_theta")
    return {"type": kind} | {key: value for key, value in rope.items() if key not in names and value is not None}


def _windows(family: str, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Mistral slides on every layer; Qwen where ``layer_types`` says so, or from ``max_window_layers`` upwards."""
    window = config.get("sliding_window", 4096 if family == "mistral" else None)
    kinds = config.get("layer_types")
    if family in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        window = None
    if kinds is not None:
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown or len(kinds) != layers:
            raise UnsupportedModelError(f"layer_types {unknown or len(kinds)} do not fit a model of {layers} layers")
    if family == "llama" or window is None:
        return (None,) * layers
    if kinds is None and family in ("qwen2", "qwen3"):
        first = int(config.get("max_window_layers", layers))
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    elif kinds is None:
        kinds = ["sliding_attention"] * layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _with_eos(spec: ModelSpec, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelSpec:
    given = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = given if isinstance(given, list) else [] if given is None else [given]
    return replace(spec, eos_ids=tuple(int(i) for i in ids))
