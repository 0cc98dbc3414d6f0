"""What a directory with a quantised copy of a model says of itself. Needs no torch.

It is a Hugging Face directory whose weights are in ``helios.safetensors``, a name that other readers do not look for:
transformers fails for want of a weight file, where with ``model.safetensors`` it would run on random weights after a
warning (a ``quantization_config`` of an unknown method is skipped with a warning too). A quantised tensor NAME is
three, NAME.codes, NAME.scale and NAME.minimum, in the shapes of ``scheme``; the others are stored in 16 bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.layout import FusedTensor
from ..errors import CheckpointError, ConfigError
from ..spec import read_json
from .scheme import Scheme

CONFIG_ENTRY = "helios_quantization"
FORMAT = "helios-quantized"
VERSION = 1
LAYER_MATRICES = frozenset({"qkv.weight", "out.weight", "up.weight", "down.weight"})
"""Engine tensors that are always quantised."""
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How a model directory is quantised."""

    scheme: Scheme
    lm_head: bool = False
    """Whether the LM head is quantised too."""

    @classmethod
    def of(cls, directory: Path) -> "Quantisation | None":
        """What ``config.json`` says; None if the model is not quantised. Raises CheckpointError as ``from_json``."""
        path = directory / "config.json"
        value = read_json(path).get(CONFIG_ENTRY)
        return None if value is None else cls.from_json(value, str(path))

    @classmethod
    def from_json(cls, value: Any, where: str) -> "Quantisation":
        """Raises CheckpointError for what ``to_json`` did not write, or a later version did."""
        if not isinstance(value, Mapping) or value.get("format") != FORMAT:
            raise CheckpointError(f"{where} has '{CONFIG_ENTRY}': {value!r}; it must be an object of format '{FORMAT}'")
        if value.get("version") != VERSION:
            raise CheckpointError(
                f"{where} is quantised in version {value.get('version')} of the format, this release reads {VERSION}; "
                f"make the copy again with `helios quantize`"
            )
        try:
            scheme = Scheme(value["bits"], value["group_size"], value["dim"]).validate()
        except (KeyError, TypeError, ConfigError) as error:
            raise CheckpointError(f"{where} describes its quantisation wrongly: {error}") from None
        return cls(scheme, value.get("lm_head") is True)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "bits": self.scheme.bits,
            "group_size": self.scheme.group_size,
            "dim": self.scheme.dim,
            "lm_head": self.lm_head,
        }

    def covers(self, fused: FusedTensor) -> bool:
        """Whether the parts of an engine tensor are quantised."""
        return fused.name in LAYER_MATRICES or (self.lm_head and fused.name == LM_HEAD)

    def nbytes(self, fused: FusedTensor, itemsize: int) -> int:
        """Bytes of an engine tensor, ``itemsize`` an element if it is not quantised."""
        if not self.covers(fused):
            return fused.size * itemsize
        return sum(self.scheme.nbytes(part.shape) for part in fused.parts)


def stored_names(name: str) -> tuple[str, str, str]:
    """The file's names of codes, scale and minimum of a quantised tensor."""
    return f"{name}.codes", f"{name}.scale", f"{name}.minimum"
