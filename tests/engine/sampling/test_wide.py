import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.wide import BLOCK, argmax, candidates, inverse_cdf


def coarse(rows: int, blocks: int, seed: int) -> torch.Tensor:
    """Logits with many equal values, as bfloat16 makes them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-20, 20, (rows, blocks * BLOCK), generator=generator) / 4


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 1000))
def test_argmax_is_the_first_of_equals(rows, blocks, seed):
    x = coarse(rows, blocks, seed)
    assert torch.equal(argmax(x), x.argmax(-1))


@pytest.mark.parametrize("width", [1, 3, 17, 200, 24 * BLOCK])
def test_candidates_are_the_largest_in_falling_order(width):
    x = torch.randn(4, 24 * BLOCK, generator=torch.Generator().manual_seed(0))
    values, ids = candidates(x, width)
    assert torch.equal(values, x.sort(dim=-1, descending=True).values[:, :width])
    assert torch.equal(x.gather(1, ids), values)


@pytest.mark.parametrize("width", [5, 11, 300])
def test_candidates_list_all_that_exceed_the_last_by_value_then_index(width):
    x = coarse(3, 24, seed=width)
    values, ids = candidates(x, width)
    for row in range(3):
        order = x[row].sort(descending=True, stable=True).indices
        sure = int((values[row] > values[row, -1]).sum())
        assert sure == int((x[row] > values[row, -1]).sum())
        assert ids[row, :sure].tolist() == order[:sure].tolist()


def test_inverse_cdf_takes_the_token_under_the_uniform():
    weights = torch.zeros(5, 3 * BLOCK)
    weights[:, 7], weights[:, 130], weights[:, 131] = 1.0, 2.0, 1.0
    uniforms = torch.tensor([0.0, 0.24, 0.26, 0.74, 1 - 2**-52], dtype=torch.float64)
    assert inverse_cdf(weights, uniforms).tolist() == [7, 7, 130, 130, 131]


@given(st.integers(0, 10_000), st.floats(0, 1 - 2**-52))
def test_inverse_cdf_never_draws_a_weight_of_zero(seed, number):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(1, 3 * BLOCK, generator=generator) * (torch.rand(1, 3 * BLOCK, generator=generator) < 0.1)
    weights[0, 5] = 1e-30
    drawn = inverse_cdf(weights, torch.tensor([number], dtype=torch.float64))
    assert weights[0, drawn] > 0
