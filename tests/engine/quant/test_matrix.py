"""Products by codes are products by what the codes expand to, with few rows and with many."""

import pytest
import torch

from engine.quant import matrix as matrix_module
from engine.quant.expand import Workspace
from engine.quant.groups import Quantised, dequantise, quantise
from engine.quant.kernels import int4_kernel_fits
from engine.quant.matrix import KERNEL_ROWS, Int4Matrix, Int8Matrix, StoredMatrix
from engine.quant.scheme import Scheme

BF16 = torch.bfloat16
TOLERANCE = 0.01
"""Of a product's largest element; bf16 has 8 bits."""


def weights(rows: int = 192, columns: int = 256, shift: float = 0.0) -> torch.Tensor:
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(0)) * 0.05 + shift


def activations(rows: int, columns: int = 256) -> torch.Tensor:
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(rows)).bfloat16()


def buffer_for(matrix: object, dtype: torch.dtype = BF16) -> torch.Tensor:
    rows, columns = matrix.shape  # type: ignore[attr-defined]
    return torch.full((rows * columns + 64,), float("nan"), dtype=dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    return bool((actual.float() - expected).abs().max() <= tolerance * expected.abs().max())


@pytest.fixture
def with_int4_kernel() -> None:
    if not int4_kernel_fits():
        pytest.skip("this CPU's int4 kernel has another layout")


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("scheme", [Scheme(4, 64), Scheme(4, 16, "output"), Scheme(8, 32), Scheme(8, None, "output")])
def test_a_stored_matrix_expands_into_the_buffer(scheme: Scheme, dtype: torch.dtype) -> None:
    q = quantise(weights(), scheme)
    stored = StoredMatrix((q,))
    buffer = buffer_for(stored, dtype)
    weight = stored.expand(buffer)
    assert torch.equal(weight, dequantise(q, dtype=dtype))
    assert weight.data_ptr() == buffer.data_ptr()
    assert buffer[192 * 256 :].isnan().all()
    rows = activations(3).to(dtype)
    bias = torch.ones(192, dtype=dtype)
    expected = rows.float() @ weight.float().t() + 1
    assert close(stored.linear(rows, bias, buffer_for(stored, dtype)), expected)


@pytest.mark.parametrize("scheme", [Scheme(4, 64), Scheme(4, 16, "output"), Scheme(8, 32), Scheme(8, None, "output")])
def test_parts_expand_below_one_another(scheme: Scheme) -> None:
    parts = [quantise(weights(rows), scheme) for rows in (80, 48, 32)]
    stored = StoredMatrix(parts)
    assert stored.shape == (160, 256)
    assert stored.nbytes == sum(part.nbytes for part in parts)
    expected = torch.cat([dequantise(part) for part in parts])
    assert torch.equal(stored.expand(buffer_for(stored, torch.float32)), expected)


def test_a_buffer_that_is_too_small_is_refused() -> None:
    stored = StoredMatrix((quantise(weights(), Scheme()),))
    with pytest.raises(ValueError, match="192, 256"):
        stored.expand(torch.empty(192 * 256 - 1))


@pytest.mark.usefixtures("with_int4_kernel")
@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 2, 7, KERNEL_ROWS, KERNEL_ROWS + 1])
def test_four_bits_multiply_as_they_expand(group_size: int, rows: int) -> None:
    q = quantise(weights(shift=0.02), Scheme(4, group_size))
    packed = StoredMatrix((q,)).pack()
    assert isinstance(packed, Int4Matrix)
    x, bias = activations(rows), torch.linspace(-1, 1, 192).bfloat16()
    expected = x.float() @ dequantise(q).t()
    assert close(packed.linear(x, None, buffer_for(packed)), expected)
    assert close(packed.linear(x, bias, buffer_for(packed)), expected + bias.float())


@pytest.mark.usefixtures("with_int4_kernel")
def test_few_rows_leave_the_buffer_alone_and_many_expand_into_it() -> None:
    packed = StoredMatrix((quantise(weights(), Scheme()),)).pack()
    buffer = buffer_for(packed)
    packed.linear(activations(KERNEL_ROWS), None, buffer)
    assert buffer.isnan().all()
    packed.linear(activations(KERNEL_ROWS + 1), None, buffer, Workspace())
    assert not buffer[: 192 * 256].isnan().any()


@pytest.mark.usefixtures("with_int4_kernel")
def test_a_packed_matrix_shares_the_codes_and_expands_to_nearly_the_stored_values() -> None:
    q = quantise(weights(), Scheme())
    scales = torch.empty((4, 192, 2), dtype=BF16)
    packed = StoredMatrix((q,)).pack(scales)
    assert packed.nbytes == q.nbytes == q.codes.nbytes + scales.nbytes
    step = (q.scale.float().max() * 15).item()
    error = (packed.expand(buffer_for(packed, torch.float32)) - dequantise(q)).abs().max()
    assert 0 < error < 15 * step * 2**-8
    kept = packed.expand(buffer_for(packed, torch.float32)).clone()
    q.scale.zero_()  # not used any more
    assert torch.equal(packed.expand(buffer_for(packed, torch.float32)), kept)
    q.codes.zero_()  # the codes are
    assert not torch.equal(packed.expand(buffer_for(packed, torch.float32)), kept)


@pytest.mark.parametrize("shift", [0.0, 0.3])
@pytest.mark.parametrize("rows", [1, 5, KERNEL_ROWS + 1])
def test_eight_bits_a_row_multiply_as_they_expand(rows: int, shift: float) -> None:
    q = quantise(weights(shift=shift), Scheme(8, None))
    packed = StoredMatrix((q,)).pack()
    assert isinstance(packed, Int8Matrix)
    x, bias = activations(rows), torch.linspace(-1, 1, 192).bfloat16()
    expected = x.float() @ dequantise(q).t()
    assert close(packed.linear(x, None, buffer_for(packed)), expected)
    assert close(packed.linear(x, bias, buffer_for(packed)), expected + bias.float())
    assert torch.equal(packed.expand(buffer_for(packed, torch.float32)), dequantise(q))


@pytest.mark.parametrize(
    ("scheme", "shape", "dtype"),
    [
        (Scheme(4, 64), (192, 256), torch.float32),
        (Scheme(4, 16), (192, 256), BF16),
        (Scheme(4, None), (192, 512), BF16),
        (Scheme(4, 64, "output"), (192, 256), BF16),
        (Scheme(4, 64), (96, 256), BF16),
        (Scheme(8, 64), (192, 256), BF16),
        (Scheme(8, None), (192, 264), BF16),
        (Scheme(8, None, "output"), (192, 256), BF16),
    ],
)
def test_what_no_kernel_can_do_is_not_packed(scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype) -> None:
    stored = StoredMatrix((quantise(weights(*shape), scheme),))
    assert not stored.packable(dtype)
    if dtype == BF16:
        with pytest.raises(ValueError, match="no kernel"):
            stored.pack()


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the layout is that of AVX-512")
def test_the_int4_kernel_reads_our_layout_with_avx_512() -> None:
    assert int4_kernel_fits()


def test_a_kernel_of_another_layout_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_module, "int4_kernel_fits", lambda: False)
    assert not StoredMatrix((quantise(weights(), Scheme()),)).packable(BF16)


def test_the_kernel_is_refused_when_it_packs_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    monkeypatch.setattr(
        torch.ops.aten, "_convert_weight_to_int4pack_for_cpu", lambda codes, tiles: original(codes, tiles).flip(0)
    )
    assert not int4_kernel_fits.__wrapped__()


@pytest.mark.usefixtures("with_int4_kernel")
def test_codes_in_a_slot_are_used_where_they_lie() -> None:
    q = quantise(weights(), Scheme())
    slot = torch.zeros(q.codes.nbytes + 64, dtype=torch.uint8)
    codes = slot[64:].view(q.codes.shape).copy_(q.codes)
    packed = StoredMatrix((Quantised(codes, q.scale, q.minimum, q.shape, q.scheme),)).pack()
    x = activations(1)
    assert close(packed.linear(x, None, buffer_for(packed)), x.float() @ dequantise(q).t())
