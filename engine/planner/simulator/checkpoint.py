"""The checkpoint that a model of some shape would have: where each of its tensors would lie."""

import math
from pathlib import Path

import torch

from ...checkpoint.index import TensorInfo
from ...checkpoint.layout import all_groups
from ...errors import CheckpointError
from ...quant.format import stored_names
from ...sizes import Sizes

FILE = Path("model.safetensors")
ALIGNMENT = 4096
"""Each tensor begins where direct I/O likes it."""


class SimulatedIndex:
    """A TensorIndex of tensors in the compute dtype, or in the codes of the quantisation."""

    def __init__(self, sizes: Sizes) -> None:
        spec, dtype, quantisation = sizes.spec, sizes.dtype, sizes.quantisation
        self._tensors: dict[str, TensorInfo] = {}
        self._end = 0
        for fused in (fused for group in all_groups(spec) for fused in group):
            for part in fused.parts:
                if quantisation is None or not quantisation.covers(fused):
                    self._add(part.source, part.shape, dtype)
                    continue
                scheme = quantisation.scheme
                shapes = scheme.codes_shape(part.shape), scheme.scale_shape(part.shape), scheme.scale_shape(part.shape)
                codes = torch.uint8 if scheme.bits == 4 else torch.int8
                types = codes, torch.float16, torch.float16
                for name, shape, stored in zip(stored_names(part.source), shapes, types, strict=True):
                    self._add(name, shape, stored)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise CheckpointError(f"a model of this shape has no tensor '{name}'")
        return self._tensors[name]

    def _add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = math.prod(shape) * dtype.itemsize
        self._tensors[name] = TensorInfo(name, FILE, self._end, size, dtype, shape)
        self._end += -(-size // ALIGNMENT) * ALIGNMENT
