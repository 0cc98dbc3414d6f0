"""Writing heads."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ..checkpoint.index import Checkpoint
from ..checkpoint.writer import write_mixed
from ..spec import Exit, ModelSpec
from .heads import describe, fingerprint


def save_heads(
    path: Path,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    exits: Sequence[Exit],
    tensors: Mapping[str, Tensor],
    frequent: Sequence[int] = (),
) -> None:
    """Write the heads of a model's exits, whose ``tensors`` are named as in ``heads``, and the tokens that the model
    says most often. The file is there whole or not at all. Raises OSError as the disk does."""
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    temporary = path.with_name(f"{path.name}.writing")
    try:
        pieces = (tensor.detach().contiguous().view(-1) for tensor in tensors.values())
        write_mixed(temporary, entries, pieces, describe(exits, fingerprint(checkpoint, spec), frequent))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
