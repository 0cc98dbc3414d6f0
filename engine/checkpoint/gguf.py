"""GGUF import: a model file of llama.cpp becomes an ordinary Hugging Face directory.

Tensors are expanded a few rows at a time and written straight to the safetensors file: at no time is more than one
piece in memory (transformers' own reader takes several GB for a 1.5B model). The tokenizer comes from transformers,
the config from ``gguf_config``.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError
from ..spec import ModelSpec
from .gguf_config import GgufFile, config_of, generation_config_of, open_gguf
from .index import SINGLE_FILE, Checkpoint
from .layout import check
from .staging import staged
from .store import Origin, write_origin
from .writer import write_safetensors

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PIECE_ELEMENTS = 2**22
"""Elements expanded at once: 16 MiB in fp32."""

Progress = Callable[[int, int], None]
"""Told of the elements written so far and of all elements."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def import_gguf(
    file: Path,
    directory: Path,
    dtype: str = "bfloat16",
    progress: Progress | None = None,
    *,
    extra_eos_ids: Sequence[int] = (),
    origin: Origin | None = None,
    replace: bool = False,
) -> None:
    """Convert ``file`` into the model directory ``directory``, which appears only when it is complete.

    ``extra_eos_ids`` end a generation beside the ids that the file names; ``origin`` is noted in the directory, the
    file itself if not given. Raises CheckpointError for a damaged file, UnsupportedModelError for an architecture or
    feature that the engine lacks (both before anything is written), HeliosError for a directory in the way.
    """
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype is '{dtype}'; a GGUF file can be imported as {', '.join(DTYPES)}")
    gguf = open_gguf(file)
    with staged(directory, replace) as temporary:
        _convert(gguf, temporary, dtype, progress, extra_eos_ids)
        write_origin(temporary, origin or Origin(str(file), str(gguf.get("general.license") or "")))
        check(Checkpoint(temporary), ModelSpec.from_directory(temporary))


def _convert(
    gguf: GgufFile, directory: Path, dtype: str, progress: Progress | None, extra_eos_ids: Sequence[int]
) -> None:
    shapes = {hf_name(tensor.name): tuple(int(n) for n in reversed(tensor.shape)) for tensor in gguf.tensors}
    _write_json(directory / "config.json", config_of(gguf) | {"dtype": dtype})
    _write_json(directory / "generation_config.json", generation_config_of(gguf, extra_eos_ids))
    _save_tokenizer(gguf.path, directory)
    write_safetensors(directory / SINGLE_FILE, shapes, DTYPES[dtype], _pieces(gguf, progress))


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor. Raises CheckpointError for one that no supported model has."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    module, _, kind = rest.partition(".")
    if prefix != "blk" or module not in _LAYER_NAMES or kind not in ("weight", "bias"):
        raise CheckpointError(f"the GGUF file has a tensor '{name}' that no supported architecture uses")
    return f"model.layers.{layer}.{_LAYER_NAMES[module]}.{kind}"


def _pieces(gguf: GgufFile, progress: Progress | None) -> Iterator[torch.Tensor]:
    """The elements of every tensor in the file's order, in fp32, some rows at a time."""
    from gguf import dequantize

    total = sum(int(tensor.n_elements) for tensor in gguf.tensors)
    done = 0
    for tensor in gguf.tensors:
        # A vector is one row; a matrix has its rows first, and quantisation blocks never cross them.
        data = tensor.data if tensor.data.ndim > 1 else tensor.data[None]
        columns = int(tensor.n_elements) // len(data)
        order = _row_order(gguf, tensor.name, tensor.data)
        step = max(1, PIECE_ELEMENTS // columns)
        for start in range(0, len(data), step):
            rows = data[start : start + step] if order is None else data[order[start : start + step]]
            try:
                piece = dequantize(rows, tensor.tensor_type)
            except NotImplementedError:
                raise CheckpointError(
                    f"{gguf.path}: tensor '{tensor.name}' is quantised as {tensor.tensor_type.name}, which cannot be "
                    f"expanded here; take a Q4_K_M, Q8_0 or F16 file of the model"
                ) from None
            yield torch.from_numpy(np.require(piece, requirements=["C", "W"]))
            done += piece.size
            if progress is not None:
                progress(done, total)


def _row_order(gguf: GgufFile, name: str, data: Any) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Which rows of the file's tensor make up the Hugging Face one, for those that llama.cpp reorders.

    Its Llama rotates neighbouring pairs of a head's rows, transformers' rotates halves: row ``2 i + h`` of a head in
    the file is row ``h * head_dim / 2 + i``. A bias is one row here, so its elements would need the same; Llama models
    with biases on query and key are refused by ``open_gguf``.
    """
    if gguf.architecture != "llama" or not name.endswith(("attn_q.weight", "attn_k.weight")):
        return None
    heads = gguf.integer("attention.head_count")
    if name.endswith("attn_k.weight"):
        heads = gguf.integer("attention.head_count_kv", heads)
    return np.arange(len(data)).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _save_tokenizer(file: Path, directory: Path) -> None:
    from transformers import AutoTokenizer

    with _quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        except Exception as error:  # the tokenizers library raises nothing more specific
            raise CheckpointError(f"{file}: its tokenizer cannot be converted: {error}") from error
        tokenizer.save_pretrained(str(directory))


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars or warnings of transformers', which speak of things a user did not ask for."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
