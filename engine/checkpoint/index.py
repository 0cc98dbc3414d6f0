"""Where every tensor of a Hugging Face checkpoint lies: file, byte offset, type and shape.

The safetensors format is an 8-byte little-endian header length, a JSON header, then the tensors' bytes. It is parsed
here rather than by the library, since the engine reads by offset into memory of its own and never maps a file.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import torch

from ..errors import CheckpointError
from ..spec import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
QUANTISED_FILE = "helios.safetensors"
"""A quantised copy's. Any other name than SINGLE_FILE makes other readers refuse the directory, where they would take
the codes' tensors for unknown ones and run on random weights."""
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit. A garbage length is nearly always larger."""

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor in a file. ``offset`` counts bytes from the start of the file."""

    name: str
    file: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class TensorIndex(Protocol):
    """Where tensors lie."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def info(self, name: str) -> TensorInfo:
        """Raises CheckpointError if there is no tensor of that name."""


class Checkpoint:
    """The tensors of a model directory: ``model.safetensors``, or the shards its index lists, or a quantised copy's
    ``helios.safetensors``. Holds no file open.

    Raises CheckpointError when the directory or a file is missing, truncated, damaged or of a foreign format.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._tensors = dict(_tensors(directory))

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor's name, in the order of the files."""
        return tuple(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def info(self, name: str) -> TensorInfo:
        """Raises CheckpointError if there is no tensor of that name."""
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.directory} has no tensor '{name}' among its {len(self._tensors)}") from None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(info.nbytes for info in self._tensors.values())


def _tensors(directory: Path) -> Iterator[tuple[str, TensorInfo]]:
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; give one with config.json and safetensors files")
    if (directory / SINGLE_FILE).is_file():
        yield from parse_file(directory / SINGLE_FILE).items()
    elif (directory / INDEX_FILE).is_file():
        yield from _sharded(directory).items()
    elif (directory / QUANTISED_FILE).is_file():
        yield from parse_file(directory / QUANTISED_FILE).items()
    else:
        raise CheckpointError(_no_weights(directory))


def _no_weights(directory: Path) -> str:
    """Why the directory has nothing to read, and what to do about what it has instead."""
    files = sorted(path.name for path in directory.iterdir() if path.is_file())
    lacks = f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    for suffixes, remedy in (
        ((".gguf",), "import it with `helios models import`"),
        ((".bin", ".pt", ".pth", ".ckpt"), "pickled weights are never loaded: convert it to safetensors first"),
        ((".safetensors",), f"rename it to {SINGLE_FILE} or add {INDEX_FILE}"),
    ):
        found = [name for name in files if name.endswith(suffixes)]
        if found:
            return f"{lacks}, only {', '.join(found[:3])}; {remedy}"
    return f"{lacks}; a model directory needs one of them"


def _sharded(directory: Path) -> dict[str, TensorInfo]:
    path = directory / INDEX_FILE
    shard_of = read_json(path).get("weight_map")
    if not isinstance(shard_of, dict) or not all(isinstance(shard, str) for shard in shard_of.values()):
        raise CheckpointError(f"{path} has no 'weight_map' of tensor names to file names")
    shards: dict[str, dict[str, TensorInfo]] = {}
    for shard in sorted(set(shard_of.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{path} names the shard '{shard}'; a shard must lie in the model's own directory")
        shards[shard] = parse_file(directory / shard)
    tensors = {}
    for name, shard in shard_of.items():
        if name not in shards[shard]:
            raise CheckpointError(f"{path} says '{name}' is in {shard}, which has no such tensor")
        tensors[name] = shards[shard][name]
    for shard_tensors in shards.values():  # unlisted ones too: a foreign tensor must not go unnoticed
        for name, info in shard_tensors.items():
            tensors.setdefault(name, info)
    return tensors


def parse_file(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, by name. Raises CheckpointError for anything but a sound, whole file."""
    header, start, size = _header(path)
    infos = [_parse_entry(path, start, name, entry) for name, entry in header.items() if name != "__metadata__"]
    _check_extents(path, size, infos)
    return {info.name: info for info in infos}


def read_metadata(path: Path) -> dict[str, str]:
    """What a safetensors file says of itself; nothing, if it says nothing. Raises CheckpointError as ``parse_file``."""
    entries = _header(path)[0].get("__metadata__", {})
    return {str(name): str(text) for name, text in entries.items()} if isinstance(entries, dict) else {}


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """A file's header, the byte after it, and the file's size."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
                raise CheckpointError(_bad_length(path, size, length))
            header = _parse_json(path, file.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; download the checkpoint again") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    return header, LENGTH_BYTES + length, size


def _bad_length(path: Path, size: int, length: int) -> str:
    if size < LENGTH_BYTES:
        return f"{path} is {size} bytes long, too short for a safetensors file"
    return (
        f"{path} claims a header of {length} bytes, but the file is {size} bytes and the format's limit "
        f"{MAX_HEADER_BYTES}; it is no safetensors file or it was cut short"
    )


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is no safetensors file: its header is a {type(header).__name__}, not an object")
    return header


def _parse_entry(path: Path, start: int, name: str, entry: Any) -> TensorInfo:
    where = f"{path}: tensor '{name}'"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} has a header entry that is no object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not _are_sizes(shape):
        raise CheckpointError(f"{where} has the shape {shape}; it must be a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has the data_offsets {offsets}; they must be [begin, end]")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{where} has type {dtype}; the engine reads {', '.join(DTYPES)}")
    nbytes = offsets[1] - offsets[0]
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if nbytes != expected:
        raise CheckpointError(f"{where} takes {nbytes} bytes; {dtype} of shape {shape} takes {expected}")
    return TensorInfo(name, path, start + offsets[0], nbytes, DTYPES[dtype], tuple(shape))


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    # bool is an int to Python, and a JSON true is no size
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_extents(path: Path, size: int, infos: list[TensorInfo]) -> None:
    end, before = 0, ""
    for info in sorted(infos, key=lambda info: (info.offset, info.nbytes)):
        if info.offset < end:
            raise CheckpointError(f"{path}: tensors '{before}' and '{info.name}' overlap at byte {info.offset}")
        end, before = info.offset + info.nbytes, info.name
    if end > size:
        raise CheckpointError(f"{path} is truncated: its header needs {end} bytes, there are {size}; download it again")
