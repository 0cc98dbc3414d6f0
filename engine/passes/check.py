"""The head of an exit that tokens may leave at: how sure it is, and the logits of those that leave."""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ..batch import Batch
from ..device import Device
from ..exits.confidence import confidence
from ..spec import ModelSpec
from ..sweep import ExitHead
from ..weight_store import WeightStore
from ..weights import HeadWeights, Matrix


class Check(ExitHead):
    """Sink: gives the logits [leaving rows, V] of the wanted rows that are sure enough."""

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        weights: WeightStore,
        before: HeadWeights,
        *,
        margin: bool,
        frequent: Matrix | None,
    ) -> None:
        """``margin`` asks for the lead over the second best; ``frequent`` are the LM head's rows [K, H] that confidence
        is looked for among, None is all of them."""
        super().__init__(spec, device, weights, before)
        self._margin, self._frequent = margin, frequent
        self.thresholds: Seq[float] = ()
        """Of the wanted rows, to be set before the sweep."""
        self.leaving: list[bool] = []
        """Which of them leave, after it."""

    def result(self, batch: Batch) -> Tensor:
        ready = self.ready(batch)
        if self._frequent is None:
            logits = self.logits(ready)
            return logits[self._decide(logits)]
        return self.logits(ready[self._decide(self._device.linear(ready, self._frequent))])

    def _decide(self, logits: Tensor) -> Tensor:
        """Numbers of the rows that leave."""
        sure = confidence(logits, self._margin).tolist()
        self.leaving = [value >= least for value, least in zip(sure, self.thresholds, strict=True)]
        return torch.tensor(
            [i for i, leaves in enumerate(self.leaving) if leaves], device=logits.device, dtype=torch.int64
        )
