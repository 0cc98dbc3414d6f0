"""No pass at all: the model's weights are not there."""

from collections.abc import Sequence as Seq

from ..batch import Share
from ..request import SamplingParams
from ..sequence import Sequence
from .base import PassStats, Said, check_depth, refuse_threshold


class ParkedPass:
    """Holds nothing, so that what the last pass held can go."""

    def __init__(self) -> None:
        self.layers, self.ahead, self.stats = range(0), 0, PassStats()

    def check(self, params: SamplingParams) -> None:
        check_depth(params, [])
        refuse_threshold(params)

    def run(self, number: int, shares: Seq[Share]) -> list[Said]:
        raise AssertionError("nothing is scheduled while a model is parked")

    def forget(self, sequence: Sequence) -> None:
        return
