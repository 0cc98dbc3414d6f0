"""The Performance History Table (helios.md section 2): what each model did at each depth, over all its replicas.

Replicas report cumulative counters. The table keeps each replica's last reading and adds the differences, so a
report that comes twice adds nothing and one that is lost is made up by the next. A restarted replica counts from
zero again and says so with a new epoch.
"""

import math
from dataclasses import dataclass, field

from .report import Counters, Report

Key = tuple[str, int]
"""(model, depth in layers)"""


@dataclass(frozen=True, slots=True)
class Figures:
    """An entry of the table as rates. None where there is nothing to divide by."""

    requests: int
    tokens: int
    throughput: float | None
    """Generated tokens per second of sweeps."""
    ttft_s: float | None
    """Mean time to the first token."""
    tpot_s: float | None
    """Mean time per token after the first."""
    perplexity: float | None
    confidence: float | None

    @classmethod
    def of(cls, sums: Counters) -> "Figures":
        mean_logprob = _ratio(sums.sum_logprob, sums.tokens)
        return cls(
            requests=sums.requests,
            tokens=sums.tokens,
            throughput=_ratio(sums.tokens, sums.busy_s),
            ttft_s=_ratio(sums.ttft_s, sums.requests),
            tpot_s=_ratio(sums.decode_s, sums.decode_tokens),
            perplexity=None if mean_logprob is None else math.exp(-mean_logprob),
            confidence=_ratio(sums.sum_confidence, sums.tokens),
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """The last counters a replica reported, by depth, and the life they belong to."""

    epoch: int
    counters: dict[int, Counters]


@dataclass(slots=True)
class PerformanceTable:
    """Sums by (model, depth), and what is needed to add the next report to them."""

    sums: dict[Key, Counters] = field(default_factory=dict)
    readings: dict[tuple[str, int], Reading] = field(default_factory=dict)
    """By (model, replica)."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """The configuration each model's figures were taken under."""

    def record(self, report: Report) -> bool:
        """Add what is new in a report; returns whether anything was.

        A report of an earlier life, or an older one of this life that was overtaken, is dropped whole.
        """
        last = self.readings.get((report.model, report.replica))
        if last is None or last.epoch < report.epoch:
            last = Reading(report.epoch, {})
        if last.epoch > report.epoch:
            return False
        before = {depth: last.counters.get(depth, Counters()) for depth in report.counters}
        if not all(before[depth].precedes(now) for depth, now in report.counters.items()):
            return False
        changed = False
        for depth, now in report.counters.items():
            if now != before[depth]:
                key = (report.model, depth)
                self.sums[key] = self.sums.get(key, Counters()) + (now - before[depth])
                changed = True
        self.readings[(report.model, report.replica)] = Reading(report.epoch, {**last.counters, **report.counters})
        return changed

    def keep_only(self, fingerprints: dict[str, str]) -> None:
        """Forget models whose configuration changed: figures of another configuration are no evidence for this one.

        A model that is merely not served at present keeps its figures.
        """
        for model, fingerprint in fingerprints.items():
            if self.fingerprints.get(model, fingerprint) != fingerprint:
                self.sums = {key: sums for key, sums in self.sums.items() if key[0] != model}
                self.readings = {key: reading for key, reading in self.readings.items() if key[0] != model}
        self.fingerprints.update(fingerprints)

    def figures(self, model: str) -> Figures:
        """A model's figures at the depth it was used at most: the only one there is until models are cut."""
        depths = [sums for (name, _), sums in self.sums.items() if name == model]
        return Figures.of(max(depths, key=lambda sums: sums.tokens, default=Counters()))


def _ratio(above: float, below: float) -> float | None:
    return above / below if below > 0 else None
