"""A model that ends at an exit, as a checkpoint: its lower layers, and the exit's head in place of the rest."""

from pathlib import Path

from ..checkpoint.index import Checkpoint, TensorInfo
from ..config import EngineConfig
from ..errors import CheckpointError, ConfigError
from ..quant.format import Quantisation
from ..spec import Exit, ModelSpec
from .heads import FILE, SHARED, Heads, read_heads, shared_heads


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
    """The heads that a configuration names, or those beside the model; none if it has none.

    Raises ConfigError for a file that is not there, CheckpointError as ``read_heads``.
    """
    if config.exits == SHARED:
        return shared_heads(spec)
    path = directory / FILE if config.exits is None else Path(config.exits).expanduser()
    if path.is_file():
        return read_heads(path, checkpoint, spec)
    if config.exits is not None:
        raise ConfigError(
            f"exits is '{config.exits}', which is no file; name one that `helios tune-exits` made, or shared"
        )
    return Heads((), {})


def cut(
    config: EngineConfig, checkpoint: Checkpoint, heads: Heads, spec: ModelSpec, quantisation: Quantisation | None
) -> tuple[Checkpoint | CutCheckpoint, ModelSpec, Exit | None]:
    """The checkpoint and the spec of the model at the depth that a configuration asks for, and the exit it ends at.

    Raises ConfigError for a depth that is none, or has no head.
    """
    if config.depth is None or config.depth == spec.n_layers:
        return checkpoint, spec, None
    if config.depth > spec.n_layers:
        raise ConfigError(f"depth is {config.depth}; this model has {spec.n_layers} layers")
    found = heads.at(config.depth)
    if found.kind == "block" and quantisation is not None:
        raise CheckpointError(
            f"the exit at layer {found.layer} has a block in 16 bits and this model's layers are in "
            f"{quantisation.scheme.bits}; use an exit of another kind, or the model as it was before"
        )
    return CutCheckpoint(checkpoint, heads, spec, found), spec.at(found), found
