"""Writing a safetensors file tensor by tensor, so that a model never has to be in memory as a whole."""

import json
import math
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

import torch

from .index import DTYPES, LENGTH_BYTES

ALIGNMENT = 4096
"""The first tensor starts at a multiple of this, for direct I/O."""


Entry = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor in a file."""


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    pieces: Iterable[torch.Tensor],
) -> None:
    """Write tensors of one type. ``pieces`` are runs of their elements, all tensors' in the order of ``shapes``.

    Raises ValueError if the pieces do not add up to the shapes, OSError as the disk does.
    """
    entries = {name: (dtype, shape) for name, shape in shapes.items()}
    write_mixed(path, entries, (piece.detach().to(dtype) for piece in pieces), {"format": "pt"})


def write_mixed(
    path: Path, entries: MutableMapping[str, Entry], pieces: Iterable[torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write tensors of several types. ``pieces`` are runs of their elements, in the types and the order of the entries.

    Whoever makes the pieces may still exchange an entry's type for one of the same size: the header is written last.
    Raises ValueError if the pieces do not add up to the shapes, OSError as the disk does.
    """
    length = _padded(len(_header(entries, metadata)) + len(entries))  # a type's name may become one letter longer
    expected = sum(math.prod(shape) * dtype.itemsize for dtype, shape in entries.values())
    written = 0
    with path.open("wb") as file:
        file.seek(LENGTH_BYTES + length)
        for piece in pieces:
            flat = piece.detach().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
            written += flat.nbytes
        file.seek(0)
        file.write(length.to_bytes(LENGTH_BYTES, "little"))
        file.write(_header(entries, metadata).ljust(length))  # the format allows trailing spaces in the header
    if written != expected:
        raise ValueError(f"{path}: the pieces have {written} bytes, the shapes {expected}")


def _padded(length: int) -> int:
    """The length of a header after which the first tensor is aligned."""
    return length + -(LENGTH_BYTES + length) % ALIGNMENT


def _header(tensors: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    codes = {dtype: code for code, dtype in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return json.dumps(header).encode()
