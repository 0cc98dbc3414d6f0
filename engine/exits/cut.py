"""A model that ends at an exit, as a checkpoint: its lower layers, and the exit's head in place of the rest."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..checkpoint.index import Checkpoint, TensorInfo
from ..config import EngineConfig
from ..errors import CheckpointError, ConfigError
from ..quant.format import Quantisation
from ..spec import Exit, ModelSpec
from .heads import FILE, Heads, fingerprint, is_shared, read_heads, shared_heads, trunk_of

SHIPPED = Path(__file__).parent.parent / "heads"
"""Heads that come with Helios, in a folder for each model."""


class CutCheckpoint:
    """Tensors of the model and, under the names that the model's own would have, those of one exit's head."""

    def __init__(self, checkpoint: Checkpoint, heads: Heads, spec: ModelSpec, found: Exit) -> None:
        self._checkpoint, self._heads = checkpoint, heads
        self._sources = heads.sources(checkpoint, spec, found)
        self.directory = checkpoint.directory

    @property
    def names(self) -> tuple[str, ...]:
        return (*self._checkpoint.names, *(name for name in self._sources if name not in self._checkpoint))

    def info(self, name: str) -> TensorInfo:
        """Raises CheckpointError if there is no tensor of that name."""
        if name in self._sources:
            return self._heads.tensors[self._sources[name]]
        return self._checkpoint.info(name)


def heads_of(config: EngineConfig, directory: Path, checkpoint: Checkpoint, spec: ModelSpec) -> Heads:
    """The heads that a configuration names, those beside the model, or those that come with Helios for its trunk; none
    if there are none.

    Raises ConfigError for a file that is not there, CheckpointError as ``read_heads``.
    """
    if config.exits is not None and is_shared(config.exits):
        return shared_heads(config.exits, spec)
    path = directory / FILE if config.exits is None else Path(config.exits).expanduser()
    if path.is_file():
        return read_heads(path, checkpoint, spec)
    if config.exits is not None:
        raise ConfigError(
            f"exits is '{config.exits}', which is no file; name one that `helios tune-exits` made, or shared"
        )
    shipped = next(
        (path for path in SHIPPED.glob(f"*/{FILE}") if trunk_of(path) == fingerprint(checkpoint, spec)), None
    )
    return read_heads(shipped, checkpoint, spec) if shipped else Heads((), {})


class Cut(NamedTuple):
    """A model of some depth: its tensors, and the exit it ends at if it is not whole."""

    tensors: Checkpoint | CutCheckpoint
    spec: ModelSpec
    end: Exit | None


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint and its exits: what a model of any depth is cut from."""

    checkpoint: Checkpoint
    spec: ModelSpec
    """Of the whole."""
    heads: Heads
    quantisation: Quantisation | None = None

    def at(self, depth: int | None) -> Cut:
        """The model up to a depth, None for the whole of it. Raises ConfigError for one that is none or has no head."""
        spec = self.spec
        if depth is None or depth == spec.n_layers:
            return Cut(self.checkpoint, spec, None)
        if depth > spec.n_layers:
            raise ConfigError(f"depth is {depth}; this model has {spec.n_layers} layers")
        end = self.heads.at(depth)
        if end.kind == "block" and self.quantisation is not None:
            raise CheckpointError(
                f"the exit at layer {end.layer} has a block in 16 bits and this model's layers are in "
                f"{self.quantisation.scheme.bits}; use an exit of another kind, or the model as it was before"
            )
        return Cut(CutCheckpoint(self.checkpoint, self.heads, spec, end), spec.at(end), end)
