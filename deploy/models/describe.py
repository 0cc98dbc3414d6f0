"""What the store and the catalogue have, as data for ``helios models list`` and ``show``."""

from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.layout import all_groups
from engine.checkpoint.store import list_models, models_dir, read_origin
from engine.errors import HeliosError
from engine.quant.format import Quantisation
from engine.spec import ModelSpec

from .catalogue import CATALOGUE

ITEM_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of the list. A model that the store lacks has ``in_store`` false and the catalogue's numbers."""

    name: str
    in_store: bool
    source: str
    licence: str
    disk_bytes: int
    layers: int | None
    supported: bool
    reason: str = ""
    """Why it is not supported."""
    quantised: str = ""
    """In words; empty for a model that is not."""


@dataclass(frozen=True, slots=True)
class Description:
    """All about one model."""

    name: str
    directory: str
    source: str
    licence: str
    architecture: str
    layers: int
    hidden_size: int
    mlp_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    parameters: int
    tied: bool
    eos_ids: tuple[int, ...]
    chat_template: bool
    stored_dtype: str
    """Of a quantised copy, what is not quantised has it."""
    quantised: str
    """In words; "no" for a model that is not."""
    disk_bytes: int
    weight_bytes: dict[str, int]
    """By compute type. Matrices that are quantised are counted as they are stored."""
    kv_bytes_per_token: dict[str, int]


def list_all() -> list[Listed]:
    """The store's models, then what the catalogue has beside them."""
    stored = list_models()
    offered = [
        Listed(
            name=entry.name,
            in_store=False,
            source=f"hub {entry.hub_id}, {len(entry.carriers)} package{'s' if len(entry.carriers) > 1 else ''}",
            licence=entry.licence,
            disk_bytes=entry.parameters * ITEM_BYTES["bfloat16"],
            layers=entry.layers,
            supported=not entry.unsupported,
            reason=entry.unsupported,
        )
        for name, entry in CATALOGUE.items()
        if name not in stored
    ]
    return [_stored(name) for name in stored] + offered


def _stored(name: str) -> Listed:
    directory = models_dir() / name
    size = disk_bytes(directory)
    licence = _licence(name, directory)
    source = read_origin(directory).source
    try:
        layers = ModelSpec.from_directory(directory).n_layers
        quantised = _quantised(Quantisation.of(directory))
    except HeliosError as error:
        return Listed(name, True, source, licence, size, None, False, str(error))
    return Listed(name, True, source, licence, size, layers, True, quantised=quantised)


def _quantised(quantisation: Quantisation | None) -> str:
    return quantisation.scheme.describe() if quantisation else ""


def describe(name: str, directory: Path) -> Description:
    """Raises CheckpointError or UnsupportedModelError for a directory without a usable config."""
    spec = ModelSpec.from_directory(directory)
    quantisation = Quantisation.of(directory)
    tensors = [tensor for group in all_groups(spec) for tensor in group]
    kv_elements = spec.n_layers * spec.kv_elements_per_token
    return Description(
        name=name,
        directory=str(directory),
        source=read_origin(directory).source,
        licence=_licence(name, directory),
        architecture=spec.architecture,
        layers=spec.n_layers,
        hidden_size=spec.hidden_size,
        mlp_size=spec.mlp_size,
        heads=spec.n_heads,
        kv_heads=spec.n_kv_heads,
        head_dim=spec.head_dim,
        vocabulary=spec.vocab_size,
        context=spec.max_positions,
        parameters=sum(tensor.size for tensor in tensors),
        tied=spec.tied,
        eos_ids=spec.eos_ids,
        chat_template=_has_chat_template(directory),
        stored_dtype=spec.dtype,
        quantised=_quantised(quantisation) or "no",
        disk_bytes=disk_bytes(directory),
        weight_bytes={
            dtype: sum(quantisation.nbytes(tensor, size) if quantisation else tensor.size * size for tensor in tensors)
            for dtype, size in ITEM_BYTES.items()
        },
        kv_bytes_per_token={dtype: kv_elements * size for dtype, size in ITEM_BYTES.items()},
    )


def disk_bytes(directory: Path) -> int:
    """Bytes of the files in a model directory."""
    return sum(path.stat().st_size for path in directory.iterdir() if path.is_file())


def _licence(name: str, directory: Path) -> str:
    noted = read_origin(directory).licence
    return noted or (CATALOGUE[name].licence if name in CATALOGUE else "")


def _has_chat_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file():
        return True
    config = directory / "tokenizer_config.json"
    return config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")
