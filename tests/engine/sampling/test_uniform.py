from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.uniform import uniform

KNOWN = [0.6524484863740321, 0.3662420901697574, 0.7012121095215251, 0.567655079718085]
SEEDS = st.integers(-(2**63), 2**63 - 1)


@given(SEEDS, st.integers(0, 2**20))
def test_it_is_below_one_even_after_multiplication(seed, position):
    number = uniform(seed, position)
    assert 0.0 <= number < 1.0
    assert number * 0.1 < 0.1


def test_its_values_do_not_change_between_versions():
    # A stream resumed on a newer release must draw what the older one would have drawn.
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1), uniform(-1, 7)] == KNOWN


def test_positions_of_a_seed_fill_the_interval_evenly():
    bins = [0] * 64
    for position in range(64_000):
        bins[int(uniform(1234, position) * 64)] += 1
    assert chi_square(bins, 1000) < 104  # 99.9 % of 63 degrees of freedom


def test_neighbouring_seeds_are_unrelated():
    bins = [0] * 64  # pairs (seed, seed + 1) at one position, on an 8 x 8 grid
    for seed in range(64_000):
        bins[int(uniform(seed, 5) * 8) * 8 + int(uniform(seed + 1, 5) * 8)] += 1
    assert chi_square(bins, 1000) < 104


def test_neighbouring_positions_are_unrelated():
    bins = [0] * 64
    for position in range(64_000):
        bins[int(uniform(99, position) * 8) * 8 + int(uniform(99, position + 1) * 8)] += 1
    assert chi_square(bins, 1000) < 104


def chi_square(counts: list[int], expected: float) -> float:
    return sum((count - expected) ** 2 / expected for count in counts)
