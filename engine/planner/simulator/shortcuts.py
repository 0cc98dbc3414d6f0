"""Elementwise operations on tensors without content, at once: torch's own take 0.2 ms each to find out their shapes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_LIKE_FIRST = {
    torch.empty_like,
    F.layer_norm,
    F.rms_norm,
    F.relu,
    F.silu,
    F.gelu,
    torch.layer_norm,
    torch.rms_norm,
    torch.relu,
    torch.Tensor.roll,
    torch.Tensor.masked_fill,
}
"""Results are new tensors, shaped as the first argument is."""
_IN_PLACE = {
    torch.Tensor.add_,
    torch.Tensor.mul_,
    torch.Tensor.addcmul_,
    torch.Tensor.copy_,
    torch.Tensor.masked_fill_,
    torch.Tensor.index_copy_,
    torch.Tensor.zero_,
}
"""Results are the first argument."""


class Shortcuts(TorchFunctionMode):
    """Entered for a whole simulation."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _LIKE_FIRST and args[0].is_meta:
            return args[0].new_empty(args[0].shape)
        if func is torch.cat and args[0][0].is_meta:
            return _joined(*args, **(kwargs or {}))
        if func is torch.index_select and kwargs and "out" in kwargs:
            return kwargs["out"]
        if func in _IN_PLACE and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0, *, out: torch.Tensor | None = None) -> torch.Tensor:
    if out is not None:
        return out
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return tensors[0].new_empty(shape)
