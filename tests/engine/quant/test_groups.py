"""Codes, scales and what comes back equal the formula bit for bit, whatever the layout, chunk and strides."""

import numpy as np
import pytest
import torch

from engine.errors import CheckpointError, ConfigError
from engine.quant import expand
from engine.quant.expand import Workspace
from engine.quant.groups import dequantise, quantise
from engine.quant.scheme import Scheme

from .reference import code_at, expected

SCHEMES = [Scheme(bits, size, dim) for bits in (4, 8) for size in (2, 32, 48, None) for dim in ("input", "output")]


def matrix(shape: tuple[int, int] = (96, 96), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values[0], values[:, 1] = 0.25, 0.25  # groups of equal elements
    return values.to(dtype)


@pytest.mark.parametrize("scheme", SCHEMES, ids=Scheme.describe)
def test_codes_and_values_are_those_of_the_formula(scheme: Scheme) -> None:
    x = matrix()
    codes, back = expected(x, scheme)
    q = quantise(x, scheme)
    assert np.array_equal([[code_at(q, i, j) for j in range(96)] for i in range(96)], codes)
    assert torch.equal(dequantise(q), torch.from_numpy(back))
    assert torch.equal(dequantise(q, dtype=torch.bfloat16), torch.from_numpy(back).bfloat16())


@pytest.mark.parametrize("scheme", SCHEMES, ids=Scheme.describe)
def test_shapes_and_bytes_are_as_the_scheme_says(scheme: Scheme) -> None:
    q = quantise(matrix((192, 96)), scheme)
    assert q.codes.shape == scheme.codes_shape(q.shape)
    assert q.scale.shape == q.minimum.shape == scheme.scale_shape(q.shape)
    assert q.nbytes == scheme.nbytes(q.shape)


@pytest.mark.parametrize("chunk", [2**13, 2**15])
@pytest.mark.parametrize("scheme", SCHEMES, ids=Scheme.describe)
def test_expanding_in_many_chunks_gives_the_same(scheme: Scheme, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = matrix((5 * 96, 192))
    q = quantise(x, scheme)
    whole = dequantise(q)
    monkeypatch.setattr(expand, "CHUNK", chunk)
    assert torch.equal(dequantise(q, workspace=Workspace()), whole)


@pytest.mark.parametrize("scheme", SCHEMES, ids=Scheme.describe)
def test_the_output_may_have_any_strides(scheme: Scheme) -> None:
    q = quantise(matrix(), scheme)
    whole = dequantise(q, dtype=torch.bfloat16)
    for out in (torch.empty(96, 96).t(), torch.empty(200, 200)[7 : 7 + 2 * 96 : 2, 3 : 3 + 96]):
        out = out.bfloat16()
        assert dequantise(q, out) is out
        assert torch.equal(out, whole)


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
@pytest.mark.parametrize("dim", ["input", "output"])
def test_codes_may_lie_anywhere_in_memory(dim: str, offset: int) -> None:
    q = quantise(matrix(), Scheme(4, 32, dim))
    whole = dequantise(q)
    memory = torch.zeros(q.codes.nbytes + 8, dtype=torch.uint8)
    codes = memory[offset : offset + q.codes.nbytes].view(q.codes.shape).copy_(q.codes)
    assert torch.equal(dequantise(type(q)(codes, q.scale, q.minimum, q.shape, q.scheme)), whole)


def test_a_constant_group_comes_back_as_it_was() -> None:
    for value in (0.0, -3.5):
        q = quantise(torch.full((64, 64), value), Scheme())
        assert torch.equal(dequantise(q), torch.full((64, 64), value))
        assert not q.codes.any()


@pytest.mark.parametrize("dim", ["input", "output"])
def test_the_error_is_half_a_step_and_the_rounding_of_scale_and_minimum(dim: str) -> None:
    x = matrix((128, 128))
    q = quantise(x, Scheme(4, 64, dim))
    step = x.view(128, 2, 64).aminmax(dim=2) if dim == "input" else x.view(2, 64, 128).aminmax(dim=1)
    largest = (step.max - step.min).max() / 15
    error = (dequantise(q) - x).abs().max()
    assert 0.4 * largest < error < 0.5 * largest + 15 * largest * 2**-11 + x.abs().max() * 2**-11


def test_values_beyond_fp16_get_scales_in_bf16() -> None:
    x = matrix(dtype=torch.bfloat16) * 1e6
    scheme = Scheme(4, 32)
    q = quantise(x, scheme)
    assert q.scale.dtype == q.minimum.dtype == torch.bfloat16
    assert torch.equal(dequantise(q), torch.from_numpy(expected(x, scheme, torch.bfloat16)[1]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_by_name(value: float) -> None:
    x = matrix()
    x[3, 3] = value
    with pytest.raises(CheckpointError, match=r"w\.weight has values that are not finite"):
        quantise(x, Scheme(4, 32), "w.weight")


@pytest.mark.parametrize(
    ("scheme", "shape", "says"),
    [
        (Scheme(4, 64), (64, 96), "96 elements along its input.*groups of 64; choose a group size that divides 96"),
        (Scheme(8, 64, "output"), (96, 64), "96 elements along its output.*groups of 64"),
        (Scheme(4, 3, "output"), (96, 64), "even groups of 3"),
        (Scheme(), (64,), "only matrices"),
        (Scheme(), (64, 2**18), "262144 columns"),
    ],
)
def test_what_cannot_be_grouped_is_refused(scheme: Scheme, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        quantise(torch.zeros(shape), scheme)


@pytest.mark.parametrize(
    ("scheme", "says"),
    [(Scheme(3), "bits is 3"), (Scheme(4, 1), "group_size is 1"), (Scheme(4, 64, "rows"), "dim is 'rows'")],  # type: ignore[arg-type]
)
def test_a_wrong_scheme_is_refused(scheme: Scheme, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        scheme.validate()


def test_an_output_of_another_shape_is_refused() -> None:
    q = quantise(matrix(), Scheme(4, 32))
    with pytest.raises(ValueError, match=r"\[96, 96\]"):
        dequantise(q, torch.empty(96, 95))
    with pytest.raises(ValueError, match=r"float32"):
        dequantise(q, torch.empty(96, 96), dtype=torch.bfloat16)


def test_an_expansion_allocates_little_beside_its_workspace() -> None:
    q = quantise(torch.randn(2048, 2048), Scheme(4, 64))
    out, workspace = torch.empty(2048, 2048).t(), Workspace()
    with torch.profiler.profile(profile_memory=True) as profile:
        dequantise(q, out, workspace=workspace)
    taken = sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())
    assert 0 < taken <= 8 * q.scale.numel()  # scales and minima in fp32, over all chunks
    held = workspace.halves.nbytes + workspace.bytes.nbytes + workspace.floats.nbytes
    assert held == expand.WORKSPACE_BYTES
