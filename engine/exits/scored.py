"""Serving at full depth with every exit scored: what it would have said, how sure it was, whether it was right."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch
from ..block import before_head
from ..checkpoint.index import Checkpoint
from ..checkpoint.layout import Naming, head_group
from ..checkpoint.reader import read_into
from ..device import Device
from ..errors import UnsupportedModelError
from ..spec import Exit, ModelSpec
from ..sweep import ExitHead, Sink, Wanted
from ..tiers import Tier
from ..weight_store import WeightStore
from ..weights import HeadWeights, head_weights
from .confidence import confidence
from .heads import Heads


class Profile(Protocol):
    """Takes what the exits at ``layers`` said; the whole model may be among them."""

    @property
    def layers(self) -> Sequence[int]: ...

    def add(self, layer: int, confidence: Any, agrees: Any, nll: Any) -> None:
        """Of positions [N]: how sure, whether the likeliest token is the last layer's, -log p of the chosen one."""
        ...


class ScoredHead(ExitHead):
    """An ExitHead with a tap at each exit. The exits' states go through the LM head together with the last ones, so its
    weights are read once; of their logits only what ``profile`` counts is kept."""

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        weights: WeightStore,
        heads: Mapping[int, HeadWeights],
        profile: Profile,
        *,
        margin: bool = False,
    ) -> None:
        super().__init__(spec, device, weights)
        self._heads, self._profile, self._margin = heads, profile, margin
        self._states = {layer: Wanted() for layer in heads}
        self._said: dict[int, Tensor] = {}
        self._best: Tensor | None = None

    @property
    def taps(self) -> Mapping[int, Sink]:  # type: ignore[override]
        return self._states

    def result(self, batch: Batch) -> Tensor:
        last = self.ready(batch)
        ready = [before_head(self._spec, self._heads[layer], s.result(batch)) for layer, s in self._states.items()]
        answers: list[Tensor] = list(self.logits(torch.cat([last, *ready])).chunk(1 + len(ready)))
        logits, said = answers[0], answers[1:]
        self._said = dict(zip(self._states, said, strict=True))
        if self._spec.n_layers in self._profile.layers:
            self._said[self._spec.n_layers] = logits
        self._best = logits.argmax(-1)
        return logits

    def chosen(self, ids: Sequence[int | None]) -> None:
        """Adds the rows that have a token to the profile."""
        rows = [i for i, token in enumerate(ids) if token is not None]
        if not rows or self._best is None:
            return
        picked = self._device.index(np.array(rows))
        tokens = self._device.index(np.array([token for token in ids if token is not None]))
        best = self._best.index_select(0, picked)
        for layer, logits in self._said.items():
            said = logits.index_select(0, picked).float().log_softmax(-1)
            agrees = (said.argmax(-1) == best).float()
            nll = -said.gather(1, tokens[:, None])[:, 0]
            figures = torch.stack([confidence(said, self._margin), agrees, nll])
            self._profile.add(layer, *self._device.to_host(figures).numpy())
        self._said, self._best = {}, None


def load_heads(
    exits: Sequence[Exit],
    heads: Heads,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    own: HeadWeights,
    device: Device,
    tier: Tier,
) -> dict[int, HeadWeights]:
    """The heads of some exits where the model computes; ``own`` is the model's.

    Raises OutOfMemoryError, CheckpointError, and UnsupportedModelError for a head with a block of its own.
    """
    loaded: dict[int, HeadWeights] = {}
    for at in exits:
        if at.kind == "shared":
            loaded[at.layer] = own
            continue
        if at.kind == "block":
            raise UnsupportedModelError(
                f"the exit at layer {at.layer} has a block, which the whole model cannot have beside it; use heads of "
                "another kind"
            )
        names = heads.by_source(checkpoint, spec, at)
        small = {}
        for tensor in head_group(replace(spec.at(at), tied=True)):
            host = torch.empty(tensor.shape, dtype=device.dtype)
            read_into(heads.tensors[names[tensor.parts[0].source]], host)
            small[tensor.name] = tier.allocate(tensor.shape, device.dtype, "weights").copy_(host)
        loaded[at.layer] = head_weights(small)
    return loaded


def load_rows(checkpoint: Checkpoint, spec: ModelSpec, tokens: Sequence[int], device: Device, tier: Tier) -> Tensor:
    """Rows [K, H] of the LM head where the model computes. Raises OutOfMemoryError, CheckpointError."""
    source = "model.embed_tokens.weight" if spec.tied else "lm_head.weight"
    info = checkpoint.info(Naming.of(checkpoint.names)(source))
    width = info.nbytes // info.shape[0]
    rows = torch.empty(len(tokens), spec.hidden_size, dtype=device.dtype)
    for row, token in zip(rows, tokens, strict=True):
        read_into(replace(info, offset=info.offset + token * width, nbytes=width, shape=(spec.hidden_size,)), row)
    tier.hold(rows.numel() * rows.itemsize, "weights")
    return device.keep_matrix(rows.to(device.torch_device))
