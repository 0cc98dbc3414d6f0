"""Writing a quantised copy of a model directory, some rows of a tensor at a time."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import replace as changed
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.index import INDEX_FILE, QUANTISED_FILE, Checkpoint, TensorInfo
from ..checkpoint.layout import Naming, all_groups, check
from ..checkpoint.reader import STAGING_BYTES, read_into
from ..checkpoint.staging import staged
from ..checkpoint.store import ORIGIN_FILE, Origin, read_origin, write_origin
from ..checkpoint.writer import Entry, write_mixed
from ..config import format_bytes
from ..errors import ConfigError, HeliosError
from ..spec import ModelSpec, read_json
from .format import CONFIG_ENTRY, FORMAT, Quantisation, stored_names
from .groups import encode, in_16_bits
from .scheme import BLOCK_ROWS, Scheme
from .stored import check_model

PIECE_ELEMENTS = 2**22
"""Elements quantised at once, in about 64 MiB; at least one group's rows."""
COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")
NOT_COPIED = ("config.json", INDEX_FILE, ORIGIN_FILE)
SIXTEEN_BITS = (torch.bfloat16, torch.float16)

Progress = Callable[[int, int], None]
"""Told of the elements written so far and of all elements."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A finished copy. Bytes are of the tensors as stored."""

    directory: Path
    source_bytes: int
    copy_bytes: int


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor of the model that is copied."""

    info: TensorInfo
    quantised: bool


def quantise_model(
    source: Path,
    directory: Path,
    quantisation: Quantisation,
    progress: Progress | None = None,
    replace: bool = False,
) -> Copied:
    """Write a copy of the model in ``source`` to ``directory``, which appears only when it is complete.

    The layers' matrices are quantised, and the LM head if so told; embedding, norms and biases are stored in their own
    16-bit type, or in bf16. Raises ConfigError for a scheme that does not fit the model, CheckpointError or
    UnsupportedModelError for a model the engine could not run, all before anything is written; HeliosError for a
    directory in the way or a full disk.
    """
    scheme = quantisation.scheme.validate()
    if Quantisation.of(source) is not None:
        raise ConfigError(f"{source} is quantised already; give the model it was made from")
    checkpoint, spec = Checkpoint(source), ModelSpec.from_directory(source)
    check(checkpoint, spec)
    if quantisation.lm_head and spec.tied:
        raise ConfigError(
            f"the LM head of {source} is its token embedding, which stays in 16 bits; leave the LM head out (--lm-head)"
        )
    sources = _sources(checkpoint, spec, quantisation)
    entries = _entries(sources, scheme)
    needed = sum(prod(shape) * dtype.itemsize for dtype, shape in entries.values())
    with staged(directory, replace) as temporary:
        _require_space(temporary, needed)
        total = sum(prod(source.info.shape) for source in sources)
        pieces = _counted(_pieces(sources, scheme, entries), total, progress)
        metadata = {key: json.dumps(value) for key, value in quantisation.to_json().items()} | {"format": FORMAT}
        write_mixed(temporary / QUANTISED_FILE, entries, pieces, metadata)
        _write_texts(source, temporary, quantisation, _stored_dtype(spec))
        check_model(Checkpoint(temporary), spec)
    return Copied(directory, checkpoint.nbytes, needed)


def _sources(checkpoint: Checkpoint, spec: ModelSpec, quantisation: Quantisation) -> list[_Source]:
    """The model's tensors in the order a token needs them. Raises ConfigError if groups do not divide one of them."""
    naming = Naming.of(checkpoint.names)
    sources = []
    for fused in (fused for group in all_groups(spec) for fused in group):
        covered = quantisation.covers(fused)
        for part in fused.parts:
            name = naming(part.source)
            if covered:
                quantisation.scheme.check(part.shape, name)
            sources.append(_Source(checkpoint.info(name), covered))
    return sources


def _entries(sources: list[_Source], scheme: Scheme) -> dict[str, Entry]:
    """Types and shapes in the file. Scales are fp16 until one is found too large."""
    entries: dict[str, Entry] = {}
    for info, quantised in ((source.info, source.quantised) for source in sources):
        if quantised:
            codes, scale, minimum = stored_names(info.name)
            entries[codes] = (torch.uint8 if scheme.bits == 4 else torch.int8, scheme.codes_shape(info.shape))
            entries[scale] = entries[minimum] = (torch.float16, scheme.scale_shape(info.shape))
        else:
            entries[info.name] = (info.dtype if info.dtype in SIXTEEN_BITS else torch.bfloat16, info.shape)
    return entries


def _pieces(sources: list[_Source], scheme: Scheme, entries: dict[str, Entry]) -> Iterator[tuple[Tensor, int]]:
    """What is written, in order, with the elements of the model that are done with it. Exchanges types of scales."""
    staging = torch.empty(STAGING_BYTES, dtype=torch.uint8)
    for source in sources:
        info = source.info
        if source.quantised:
            yield from _quantised(info, scheme, entries, staging)
        else:
            for rows in _row_pieces(info, 1):
                yield _read(rows, entries[info.name][0], staging), prod(rows.shape)


def _quantised(
    info: TensorInfo, scheme: Scheme, entries: dict[str, Entry], staging: Tensor
) -> Iterator[tuple[Tensor, int]]:
    scales, minima = [], []
    for rows in _row_pieces(info, BLOCK_ROWS if scheme.dim == "input" else scheme.group_of(info.shape)):
        codes, scale, minimum = encode(_read(rows, torch.float32, staging), scheme, f"{info.file}: '{info.name}'")
        yield codes, prod(rows.shape)
        scales.append(scale)
        minima.append(minimum)
    for name, tensor in zip(stored_names(info.name)[1:], in_16_bits(torch.cat(scales), torch.cat(minima)), strict=True):
        entries[name] = (tensor.dtype, tuple(tensor.shape))
        yield tensor, 0


def _row_pieces(info: TensorInfo, together: int) -> Iterator[TensorInfo]:
    """A tensor in runs of rows, each a multiple of ``together`` except the last."""
    rows, width = info.shape[0], prod(info.shape[1:])
    step = max(1, PIECE_ELEMENTS // (width * together)) * together
    for start in range(0, rows, step):
        count = min(step, rows - start)
        nbytes = count * width * info.dtype.itemsize
        offset = info.offset + start * width * info.dtype.itemsize
        yield changed(info, offset=offset, nbytes=nbytes, shape=(count, *info.shape[1:]))


def _read(info: TensorInfo, dtype: torch.dtype, staging: Tensor) -> Tensor:
    out = torch.empty(info.shape, dtype=dtype)
    read_into(info, out, staging)
    return out


def _counted(pieces: Iterator[tuple[Tensor, int]], total: int, progress: Progress | None) -> Iterator[Tensor]:
    done = 0
    for piece, elements in pieces:
        yield piece
        done += elements
        if progress is not None and elements:
            progress(done, total)


def _stored_dtype(spec: ModelSpec) -> str:
    """The type of what is not quantised, as a config names it."""
    return spec.dtype if spec.dtype in ("bfloat16", "float16") else "bfloat16"


def _write_texts(source: Path, directory: Path, quantisation: Quantisation, dtype: str) -> None:
    """Config, tokenizer and licence, and where the copy comes from."""
    for file in sorted({file for pattern in COPIED for file in source.glob(pattern) if file.is_file()}):
        if file.name not in NOT_COPIED:
            shutil.copyfile(file, directory / file.name)
    config = read_json(source / "config.json") | {CONFIG_ENTRY: quantisation.to_json(), "dtype": dtype}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    origin = read_origin(source)
    write_origin(directory, Origin(f"{origin.source}, {quantisation.scheme.describe()}", origin.licence))


def _require_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise HeliosError(
            f"the quantised copy takes {format_bytes(needed)}, {directory.parent} has {format_bytes(free)} left; free "
            f"some, or write it to a larger disk (-o DIRECTORY)"
        )
