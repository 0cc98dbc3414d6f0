"""Encoded heads come back within half a step of their group; the rows have the documented bytes."""

import numpy as np
import pytest
import torch

from engine.errors import ConfigError
from engine.quant import kv
from engine.quant.kv import KVCodec

from .reference import quantise_group

SHAPES = [(64, None), (128, None), (128, 32), (32, None), (16, 8), (80, 20), (96, 96), (4, 1)]


def heads(count: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn((count, head_dim), generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(("head_dim", "group_size"), SHAPES)
def test_rows_have_the_codes_scales_and_minima_of_the_formula(head_dim: int, group_size: int | None) -> None:
    codec, x = KVCodec(head_dim, group_size), heads(9, head_dim)
    size = group_size or min(64, head_dim)
    groups = head_dim // size
    rows = codec.encode(x)
    assert rows.shape == (9, head_dim // 2 + 4 * groups) == (9, codec.row_bytes)
    back = codec.decode(rows, torch.empty(9, head_dim))
    for row, values, decoded in zip(rows.numpy(), x.float().numpy(), back.numpy(), strict=True):
        parts = [quantise_group(values[i * size : (i + 1) * size], 4) for i in range(groups)]
        codes = np.concatenate([part[0] for part in parts]).astype(np.uint8)
        half = head_dim // 2
        assert np.array_equal(row[:half], codes[:half] | codes[half:] << 4)
        scales = row[half:].copy().view(np.float16)
        assert np.array_equal(scales[:groups], np.array([part[1] for part in parts]).astype(np.float16))
        assert np.array_equal(scales[groups:], np.array([part[2] for part in parts]).astype(np.float16))
        wide = scales.astype(np.float32)
        assert np.array_equal(decoded, codes * wide[:groups].repeat(size) + wide[groups:].repeat(size))


@pytest.mark.parametrize(("head_dim", "group_size"), [(64, 64), (128, 64), (80, 40), (96, 48), (24, 24)])
def test_groups_are_of_64_where_that_divides_the_head(head_dim: int, group_size: int) -> None:
    assert KVCodec(head_dim).group_size == group_size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_decoded_is_rounded_once_to_its_type(dtype: torch.dtype) -> None:
    codec = KVCodec(64)
    rows = codec.encode(heads(50, 64, dtype))
    exact = codec.decode(rows, torch.empty(50, 64))
    assert torch.equal(codec.decode(rows, torch.empty((50, 64), dtype=dtype)), exact.to(dtype))
    assert (exact - heads(50, 64, dtype).float()).abs().max() < 0.5 * 6 / 15 * 1.1


def test_many_rows_are_the_same_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, x = KVCodec(64), heads(100, 64)
    whole = codec.encode(x)
    decoded = codec.decode(whole, torch.empty((100, 64), dtype=torch.bfloat16))
    monkeypatch.setattr(kv, "ENCODED_ELEMENTS", 7 * 64)
    codec._workspace.floats = codec._workspace.floats[: 11 * 64]
    assert torch.equal(codec.encode(x), whole)
    assert torch.equal(codec.decode(whole, torch.empty((100, 64), dtype=torch.bfloat16)), decoded)


def test_rows_gathered_into_a_larger_buffer_are_decoded_there() -> None:
    codec = KVCodec(64)
    store = codec.encode(heads(20, 64), torch.zeros((30, codec.row_bytes), dtype=torch.uint8)[5:25])
    picked = store.index_select(0, torch.tensor([3, 1, 19]))
    out = torch.empty((3, 64), dtype=torch.bfloat16)
    assert codec.decode(picked, out) is out
    assert torch.equal(out, codec.decode(store, torch.empty((20, 64), dtype=torch.bfloat16))[[3, 1, 19]])


def test_zeroed_rows_decode_to_zero() -> None:
    codec = KVCodec(64)
    out = torch.full((4, 64), float("nan"))
    assert not codec.decode(torch.zeros((4, codec.row_bytes), dtype=torch.uint8), out).any()


def test_equal_elements_come_back_as_they_were() -> None:
    codec = KVCodec(64)
    x = torch.full((2, 64), -1.5)
    assert torch.equal(codec.decode(codec.encode(x), torch.empty(2, 64)), x)


def test_values_beyond_fp16_stay_finite() -> None:
    codec = KVCodec(64)
    x = heads(2, 64, torch.float32)
    x[0, 5], x[1, 9] = 1e9, -1e9
    assert codec.decode(codec.encode(x), torch.empty(2, 64)).isfinite().all()


@pytest.mark.parametrize(
    ("head_dim", "group_size", "says"),
    [(66, None, "multiples of 4"), (64, 48, "must divide"), (80, 0, "such as 40")],
)
def test_groups_that_do_not_fit_are_refused(head_dim: int, group_size: int | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        KVCodec(head_dim, group_size)
