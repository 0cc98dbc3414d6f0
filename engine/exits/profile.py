"""What exits would have said: for each, how often it agrees with the last layer, by its confidence. Histograms, so
that no logits are kept and profiles add up."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError

BINS = 100
"""Of confidence, from 0 to 1."""
ROUNDING = 1e-5
"""Of a bin: what 0.29 lacks of 29 hundredths is no reason to count it as 28."""
VERSION = 1
Values = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]


class ExitProfile:
    """Of the exits at some layers, over any number of positions."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._counts = np.zeros((len(self.layers), 2, BINS), dtype=np.int64)
        """By exit, whether it agrees, and confidence."""
        self._confidence = np.zeros(len(self.layers))
        self._nll = np.zeros(len(self.layers))

    def add(self, layer: int, confidence: Values, agrees: Values, nll: Values | None = None) -> None:
        """Positions of one exit: its confidence [N], whether its likeliest token is the last layer's [N], -log p [N]
        of the token that was chosen."""
        at = self.layers.index(layer)
        scaled = np.asarray(confidence, dtype=np.float64) * BINS + ROUNDING
        bins = np.minimum(scaled.astype(np.int64), BINS - 1)
        np.add.at(self._counts[at], (np.asarray(agrees, dtype=np.int64), bins), 1)
        self._confidence[at] += float(np.sum(confidence))
        self._nll[at] += 0.0 if nll is None else float(np.sum(nll))

    def positions(self, layer: int) -> int:
        """How many were added."""
        return int(self._at(layer).sum())

    def satisfied(self, layer: int, threshold: float) -> float:
        """Share of positions whose confidence is at least ``threshold``, to a hundredth."""
        counts = self._at(layer)
        return _share(counts[:, _bin(threshold) :].sum(), counts.sum())

    def agreement(self, layer: int, threshold: float = 0.0) -> float:
        """Share of those positions where the exit agrees with the last layer."""
        counts = self._at(layer)[:, _bin(threshold) :]
        return _share(counts[1].sum(), counts.sum())

    def threshold(self, layer: int, target: float) -> float | None:
        """The lowest confidence from which on the exit agrees on a share of at least ``target``; None if none does."""
        counts = self._at(layer)
        agreed = counts[1, ::-1].cumsum()[::-1]
        total = counts.sum(0)[::-1].cumsum()[::-1]
        good = np.flatnonzero((total > 0) & (agreed >= target * total))
        return float(good[0]) / BINS if len(good) else None

    def calibration_error(self, layer: int) -> float:
        """Mean distance between confidence and agreement over the bins, weighted by positions (ECE)."""
        counts = self._at(layer)
        total = counts.sum(0)
        middle = (np.arange(BINS) + 0.5) / BINS
        gaps = np.abs(counts[1] - middle * total)
        return _share(gaps.sum(), total.sum())

    def mean_confidence(self, layer: int) -> float:
        return _share(self._confidence[self.layers.index(layer)], self.positions(layer))

    def mean_nll(self, layer: int) -> float:
        """Of the chosen tokens under the exit; its exponential is a perplexity."""
        return _share(self._nll[self.layers.index(layer)], self.positions(layer))

    def merge(self, other: "ExitProfile") -> None:
        """Add another's positions. Raises ValueError if it is of other layers."""
        if other.layers != self.layers:
            raise ValueError(f"a profile of exits {other.layers} cannot be added to one of exits {self.layers}")
        self._counts += other._counts
        self._confidence += other._confidence
        self._nll += other._nll

    def to_dict(self) -> dict[str, Any]:
        """As ``from_dict`` reads it."""
        return {
            "version": VERSION,
            "layers": list(self.layers),
            "differed": self._counts[:, 0].tolist(),
            "agreed": self._counts[:, 1].tolist(),
            "confidence": self._confidence.tolist(),
            "nll": self._nll.tolist(),
        }

    @classmethod
    def from_dict(cls, content: Any) -> "ExitProfile":
        """Raises ConfigError for what ``to_dict`` did not write."""
        try:
            if content["version"] != VERSION:
                raise ValueError(f"version {content['version']}")
            profile = cls(content["layers"])
            for kind, name in enumerate(("differed", "agreed")):
                profile._counts[:, kind] = np.asarray(content[name], dtype=np.int64)
            profile._confidence[:] = content["confidence"]
            profile._nll[:] = content["nll"]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is no exit profile of version {VERSION}: {error}") from None
        return profile

    def _at(self, layer: int) -> Counts:
        found: Counts = self._counts[self.layers.index(layer)]
        return found


def _bin(threshold: float) -> int:
    return max(0, min(BINS, round(threshold * BINS)))


def _share(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else 0.0
