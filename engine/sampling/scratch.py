"""Buffers as wide as the vocabulary, kept from call to call."""

import torch
from torch import Tensor

from .wide import BLOCK


class Scratch:
    """Four float32 buffers [max_rows, W], allocated when first used, W the vocabulary rounded up to whole blocks.

    They are kept because pages fresh from the operating system cost more than the passes that fill them.
    """

    NAMES = ("raw", "probability", "adjusted", "scaled")

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.width = -(-vocab_size // BLOCK) * BLOCK
        self._vocab_size = vocab_size
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    @property
    def max_bytes(self) -> int:
        """What all buffers take together."""
        return len(self.NAMES) * self.max_rows * self.width * 4

    def rows(self, name: str, count: int) -> Tensor:
        """The first ``count`` rows of a buffer [count, W], with whatever was last written there."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(self.max_rows, self.width, dtype=torch.float32, device=self._device)
        return self._buffers[name][:count]

    def load(self, logits: Tensor) -> Tensor:
        """``logits`` [R, V] of any type as "raw" [R, W], the columns added being -inf."""
        raw = self.rows("raw", len(logits))
        raw[:, : self._vocab_size] = logits
        if self.width > self._vocab_size:
            raw[:, self._vocab_size :] = float("-inf")
        return raw

    def pick(self, x: Tensor, index: list[int]) -> Tensor:
        """Rows ``index``, rising, of ``x`` [R, W]: ``x`` itself where that is all of them, else a copy in "scaled"."""
        if len(index) == len(x):
            return x
        return torch.index_select(x, 0, torch.tensor(index, device=self._device), out=self.rows("scaled", len(index)))
