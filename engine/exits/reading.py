"""Exit profiles of given text: a model reads it at full depth, and at every position every exit says what is next."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..build import build
from ..config import EngineConfig
from ..errors import ConfigError
from ..passes.choose import source
from ..scheduler import Scheduler
from ..sequence import Sequence as Generation
from ..sweep import Sweep
from .profile import ExitProfile
from .scored import ScoredHead

ROWS = 64
"""Positions of a sweep, whose logits there is room for together."""
BINS = 20
"""Of the confidence of each of two models."""
VERSION = 1
Confidences = dict[int, npt.NDArray[np.float32]]
"""By layers passed, the confidence at every position but the last of a text."""


class Reader:
    """A model that reads. ``profile`` has its exits and, under the number of its layers, the whole model."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises as ``build.build``, and ConfigError for a model without exits."""
        config = replace(config, score_exits=True, depth=None, max_sequences=ROWS, prefill_rows=ROWS)
        self._parts = build(config)
        self.n_layers = self._parts.spec.n_layers
        self.layers = (*self._parts.exit_heads, self.n_layers)
        self.profile = ExitProfile(self.layers)
        self._read: list[tuple[int, Any]] = []
        self._head = ScoredHead(
            self._parts.spec,
            self._parts.device,
            self._parts.weights,
            self._parts.exit_heads,
            self,
            margin=config.confidence == "margin",
        )

    @property
    def tokenizer(self) -> Any:
        return self._parts.tokenizer

    @property
    def context(self) -> int:
        """Tokens of the longest text."""
        return self._parts.context - 1

    def read(self, tokens: Sequence[int]) -> Confidences:
        """Add a text's positions to the profile. Raises ConfigError for one of less than two tokens, or too many."""
        if not 2 <= len(tokens) <= self.context:
            raise ConfigError(f"a text has {len(tokens)} tokens; this model reads from 2 to {self.context} at a time")
        layers = range(self.n_layers)
        scheduler = Scheduler(self._parts.homes, layers, ROWS, ROWS)
        sequence = Generation.silent("text", tokens, self.n_layers)
        scheduler.add(sequence)
        self._read = []
        try:
            while sequence.kv.of(layers) < len(tokens):
                (share,) = scheduler.schedule()
                share = replace(share, logit_rows=share.count)
                self._parts.executor.run(Sweep(0, layers, [share], source(self._parts), self._head, self._head.taps))
                following = [*tokens[share.start + 1 : share.start + share.count + 1]]
                self._head.chosen([*following, *[None] * (share.count - len(following))])
        finally:
            scheduler.remove(sequence)
        parts: dict[int, list[Any]] = {layer: [] for layer in self.layers}
        for layer, confidence in self._read:
            parts[layer].append(confidence)
        return {layer: np.concatenate(found) for layer, found in parts.items()}

    def add(self, layer: int, confidence: Any, agrees: Any, nll: Any) -> None:
        """What the head tells of a layer's positions."""
        self.profile.add(layer, confidence, agrees, nll)
        self._read.append((layer, confidence))

    def close(self) -> None:
        self._parts.close()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JointProfile:
    """How sure two models are at the same positions of the same texts, for each pair of exits: where one is not, the
    other may be."""

    def __init__(self, first: Sequence[int], second: Sequence[int]) -> None:
        """Of the exits after these layers of the two models."""
        self.first, self.second = tuple(first), tuple(second)
        self._counts = np.zeros((len(self.first), len(self.second), BINS, BINS), dtype=np.int64)

    def add(self, first: Confidences, second: Confidences) -> None:
        """Positions that both have read."""
        for i, one in enumerate(self.first):
            for j, other in enumerate(self.second):
                np.add.at(self._counts[i, j], (_bins(first[one]), _bins(second[other])), 1)

    def positions(self) -> int:
        return int(self._counts[0, 0].sum())

    def rescued(self, first: tuple[int, float], second: tuple[int, float]) -> tuple[float, float]:
        """Of the positions where the first model, at an exit, is less sure than a threshold: their share of all, and
        the share of them where the second is at least as sure as its own. Thresholds count to a twentieth."""
        counts = self._counts[self.first.index(first[0]), self.second.index(second[0])]
        unsure = counts[: _edge(first[1])]
        total, of_all = int(unsure.sum()), int(counts.sum())
        return total / of_all if of_all else 0.0, float(unsure[:, _edge(second[1]) :].sum() / total) if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As ``from_dict`` reads it."""
        return {
            "version": VERSION,
            "first": list(self.first),
            "second": list(self.second),
            "counts": self._counts.tolist(),
        }

    @classmethod
    def from_dict(cls, content: Any) -> "JointProfile":
        """Raises ConfigError for what ``to_dict`` did not write."""
        try:
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']}")
            profile = cls(content["first"], content["second"])
            profile._counts = np.asarray(content["counts"], dtype=np.int64).reshape(profile._counts.shape)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no joint profile of version {VERSION}: {error}") from None
        return profile


def read_jointly(first: Reader, second: Reader, texts: Iterable[Sequence[int]]) -> JointProfile:
    """Let two models read the same tokens. Raises ConfigError if their tokenizers differ, and as ``Reader.read``."""
    if first.tokenizer.vocabulary != second.tokenizer.vocabulary:
        raise ConfigError(
            f"these models do not share a tokenizer ({first.tokenizer.vocab_size} and {second.tokenizer.vocab_size} "
            "tokens), so their positions cannot be compared; choose models of one family"
        )
    joint = JointProfile(first.layers, second.layers)
    for text in texts:
        joint.add(first.read(text), second.read(text))
    return joint


def _bins(confidence: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    scaled = np.asarray(confidence, dtype=np.float64) * BINS + 1e-5
    bins: npt.NDArray[np.int64] = np.minimum(scaled.astype(np.int64), BINS - 1)
    return bins


def _edge(threshold: float) -> int:
    return max(0, min(BINS, round(threshold * BINS)))
