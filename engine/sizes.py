"""Bytes of a model's units, as they are held: in the compute dtype, or in codes where the checkpoint is quantised."""

from dataclasses import dataclass

import torch

from .checkpoint.layout import head_elements
from .kv import BLOCK
from .quant.format import Quantisation
from .spec import Exit, ModelSpec
from .storage.direct import ALIGN
from .units import Unit, group_of, held_bytes, is_matrix, units


@dataclass(frozen=True, slots=True)
class Beside:
    """What there is for exits beside the layers that are served."""

    heads: tuple[Exit, ...] = ()
    kept: tuple[int, ...] = ()
    """Where the states of all positions are kept: after so many layers."""
    answers: int = 1
    """Rows of logits that a sequence has in a pass."""
    frequent: int = 0
    """Tokens whose rows of the LM head are there once more, for checks."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one model."""

    spec: ModelSpec
    dtype: torch.dtype
    quantisation: Quantisation | None = None
    beside: Beside = Beside()

    def matrices(self, unit: Unit) -> int:
        """Bytes of what may be placed elsewhere: of the embedding its tables, of a tied head nothing."""
        return held_bytes(self.spec, unit, self.dtype, self.quantisation)

    def small(self, unit: Unit) -> int:
        """Bytes of a unit's norms and biases, which always stay on the device."""
        group = group_of(self.spec, unit)
        return sum(tensor.size for tensor in group if not is_matrix(unit, tensor.name)) * self.dtype.itemsize

    @property
    def kept_block(self) -> int:
        """Bytes of the kept states of a block of positions."""
        return len(self.beside.kept) * BLOCK * self.spec.hidden_size * self.dtype.itemsize

    @property
    def all_matrices(self) -> int:
        return sum(self.matrices(unit) for unit in units(self.spec.n_layers))

    @property
    def all_small(self) -> int:
        heads = sum(head_elements(self.spec, end) for end in self.beside.heads)
        heads = (heads + self.beside.frequent * self.spec.hidden_size) * self.dtype.itemsize
        return heads + sum(self.small(unit) for unit in units(self.spec.n_layers))

    @property
    def slot(self) -> int:
        """Upper bound of what a slot for any unit takes: its matrices, each beginning where direct I/O likes it; or an
        exit's adapter, which is loaded through one."""
        matrices = [self.matrices(unit) for unit in self._whole_units()]
        return max(*matrices, self.small(Unit("head"))) + 4 * ALIGN

    @property
    def expansion(self) -> int:
        """Bytes of the buffer that a unit's codes are expanded into; 0 if nothing is quantised."""
        if self.quantisation is None:
            return 0
        elements = [
            sum(tensor.size for tensor in group_of(self.spec, unit) if is_matrix(unit, tensor.name))
            for unit in self._whole_units()
        ]
        return max(elements) * self.dtype.itemsize

    def _whole_units(self) -> list[Unit]:
        """Units that pass through a slot in one piece. A head in codes does, any other is cut."""
        whole = [Unit("attention"), Unit("mlp")]
        return [*whole, Unit("head")] if self.quantisation and self.quantisation.lm_head else whole
