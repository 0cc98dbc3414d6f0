"""Exit profiles against what they are of, counted one by one."""

import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from engine.errors import ConfigError
from engine.exits.profile import BINS, ExitProfile

CASES = st.lists(st.tuples(st.integers(0, BINS), st.booleans(), st.floats(0, 9)), min_size=1, max_size=60)


def profile(cases: list[tuple[int, bool, float]]) -> ExitProfile:
    made = ExitProfile((3, 7))
    confidence, agrees, nll = (np.array(column) for column in zip(*cases, strict=True))
    made.add(7, confidence / BINS, agrees, nll)
    return made


@given(CASES, st.integers(0, BINS - 1))
def test_shares_are_those_of_the_positions(cases: list[tuple[int, bool, float]], percent: int) -> None:
    made = profile(cases)
    sure = [agrees for confidence, agrees, _ in cases if confidence >= percent]
    assert made.positions(7) == len(cases)
    assert made.positions(3) == 0 == made.agreement(3)
    assert made.satisfied(7, percent / BINS) == pytest.approx(len(sure) / len(cases))
    assert made.agreement(7, percent / BINS) == pytest.approx(sum(sure) / len(sure) if sure else 0)
    assert made.mean_nll(7) == pytest.approx(sum(nll for *_, nll in cases) / len(cases))


@given(CASES, st.sampled_from([0.5, 0.9, 0.95, 1.0]))
def test_the_threshold_is_the_lowest_that_keeps_the_target(cases: list[tuple[int, bool, float]], target: float) -> None:
    made = profile(cases)
    tried = [percent / BINS for percent in range(BINS)]
    good = [th for th in tried if made.satisfied(7, th) > 0 and made.agreement(7, th) >= target]
    assert made.threshold(7, target) == (pytest.approx(good[0]) if good else None)


@given(CASES, CASES)
def test_profiles_add_up_and_are_read_back(
    one: list[tuple[int, bool, float]], other: list[tuple[int, bool, float]]
) -> None:
    both = profile(one)
    both.merge(ExitProfile.from_dict(json.loads(json.dumps(profile(other).to_dict()))))
    counted = profile(one + other).to_dict()
    for name, value in both.to_dict().items():
        assert value == (pytest.approx(counted[name]) if name in ("confidence", "nll") else counted[name])


def test_calibration_error_is_none_where_confidence_is_right() -> None:
    made = ExitProfile((1,))
    made.add(1, np.full(1000, 0.755), np.arange(1000) < 755)
    assert made.calibration_error(1) == pytest.approx(0, abs=1e-9)
    made = ExitProfile((1,))
    made.add(1, np.full(10, 0.955), np.zeros(10))
    assert made.calibration_error(1) == pytest.approx(0.955)


@pytest.mark.parametrize("content", [None, {}, {"version": 2}, {"version": 1, "layers": [1]}, {"version": 1}])
def test_what_is_no_profile_is_refused(content: object) -> None:
    with pytest.raises(ConfigError, match="no exit profile"):
        ExitProfile.from_dict(content)


def test_other_layers_are_not_added() -> None:
    with pytest.raises(ValueError, match="cannot be added"):
        ExitProfile((1,)).merge(ExitProfile((2,)))
