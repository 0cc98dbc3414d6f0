"""Writing a safetensors file tensor by tensor, so that a model never has to be in memory as a whole."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from .index import DTYPES, LENGTH_BYTES

ALIGNMENT = 4096
"""The first tensor starts at a multiple of this, for direct I/O."""


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    pieces: Iterable[torch.Tensor],
) -> None:
    """Write tensors of one type. ``pieces`` are runs of their elements, all tensors' in the order of ``shapes``.

    Raises ValueError if the pieces do not add up to the shapes, OSError as the disk does.
    """
    header = _header(shapes, dtype)
    expected = sum(math.prod(shape) for shape in shapes.values())
    written = 0
    with path.open("wb") as file:
        file.write(header)
        for piece in pieces:
            flat = piece.detach().to(dtype).contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
            written += flat.numel()
    if written != expected:
        raise ValueError(f"{path}: the pieces have {written} elements, the shapes {expected}")


def _header(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    code = next(code for code, known in DTYPES.items() if known == dtype)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    # The format allows trailing spaces in the header.
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
