"""Products of some rows by weights that come from memory, and the expansion of codes to weights."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...device import Device
from ...quant.expand import Workspace
from ...quant.groups import Quantised
from ...quant.matrix import KERNEL_ROWS, StoredMatrix
from ...quant.scheme import Scheme
from ...weights import Matrix
from ..processor import Curve
from .timing import Effort, Run, timed, usual_seconds

Shape = tuple[int, int]
MEMORY_SHARE = 0.1
"""Of the memory that is free, what the weights may take."""
SEED_ROWS = 64
"""Rows of a matrix that are drawn; they are repeated, since drawing all would take longer than multiplying."""
EMULATED_ROWS = 8
"""Rows up to which products in a type that the device has to emulate are measured: they take very long, and more rows
go no faster."""
LAYERS, DECODED = 16, 8
"""Layers and sequences of ``decode_products``: a few milliseconds."""
EXPANDED_ROWS = 512
"""Of the products by expanded codes: those of few rows go by the codes themselves."""
SHORTEST_S = 1e-6
INT4 = Scheme(bits=4)
INT8 = Scheme(bits=8, group_size=None)
"""The schemes that torch has packed kernels for, with their usual groups."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a run multiplies: whole sets of matrices [out, in], like those of a decoder layer."""

    shapes: tuple[Shape, ...]
    weights_bytes: int
    """Of all sets, about: far more than the caches hold."""
    run_flops: float
    """A run stops after the set that reaches these; with many rows weights hardly matter."""

    @property
    def elements(self) -> int:
        """Of one set."""
        return sum(math.prod(shape) for shape in self.shapes)

    def sets(self, element_bytes: float, device: Device) -> int:
        """How many sets fit what may be taken."""
        room = min(self.weights_bytes, MEMORY_SHARE * device.available_bytes())
        return max(1, int(room / (element_bytes * self.elements)))


CORES = Load(((2048, 2048), (8192, 2048), (2048, 8192)), 2**28, 2.0**34)
SMALL_CORES = Load(((576, 576), (1024, 576), (3072, 576), (576, 1536)), 2**28, 2.0**32)
"""Of hardware.SMALL elements on average, as in a model of 100 million weights, where a product's start counts."""
GPU = Load(((4096, 4096), (28672, 4096), (4096, 14336)), 2**31, math.inf)
"""Larger, so that starting a kernel takes less time than it runs."""


def load_of(device: Device) -> Load:
    return CORES if device.host is device else GPU


def as_read_ratio(device: Device, effort: Effort) -> Curve:
    """By rows, the rate of products by weights as they lie in the checkpoint to that by weights that are kept."""
    kept, read = product_rates(device, effort), product_rates(device, effort, keep=False)
    return Curve(tuple((rows, read(rows) / rate) for rows, rate in kept.points))


def small_ratio(device: Device, effort: Effort) -> Curve:
    """By rows, the rate of products by small matrices to that by the usual ones."""
    usual, small = product_rates(device, effort), product_rates(device, effort, load=SMALL_CORES)
    return Curve(tuple((rows, small(rows) / rate) for rows, rate in usual.points))


def product_rates(device: Device, effort: Effort, keep: bool = True, load: Load | None = None) -> Curve:
    """FLOP/s by rows, of plain weights in the device's dtype: as a weight store keeps them, or as they were read."""
    load = load or load_of(device)
    drawn = [_matrix(shape, device) for shape in load.shapes]
    copy = device.keep_matrix if keep else Tensor.clone
    sets = [[copy(matrix) for matrix in drawn] for _ in range(load.sets(device.dtype.itemsize, device))]
    rows = [count for count in effort.rows if count <= EMULATED_ROWS or device.dtype in device.fast_dtypes]
    return _rates(device, load, sets, rows, effort)


def decode_products(device: Device) -> Run:
    """The products of a few layers of a small model for a few sequences, by weights that come from memory."""
    load = SMALL_CORES if device.host is device else GPU
    drawn = [_matrix(shape, device) for shape in load.shapes]
    sets = [
        [device.keep_matrix(matrix) for matrix in drawn]
        for _ in range(min(LAYERS, load.sets(device.dtype.itemsize, device)))
    ]
    return timed(device, _multiply(device, load, sets, DECODED))


def packed_rates(device: Device, scheme: Scheme, effort: Effort) -> Curve | None:
    """FLOP/s by rows, up to KERNEL_ROWS, of codes multiplied by torch's kernel; None where it has none."""
    load = load_of(device)
    if not all(_codes(shape, scheme, device).packable(device.dtype) for shape in load.shapes):
        return None
    count = load.sets(scheme.bits / 8, device)
    sets: list[Sequence[Matrix]] = [
        [_codes(shape, scheme, device).pack() for shape in load.shapes] for _ in range(count)
    ]
    return _rates(device, load, sets, [rows for rows in effort.rows if rows <= KERNEL_ROWS], effort)


def expansion_rate(device: Device, effort: Effort) -> float:
    """Elements a second from four-bit codes to the device's dtype, and through a product by what came of them so far as
    that is slower than one by weights that are kept."""
    load = load_of(device)
    codes = [_codes(shape, INT4, device) for shape in load.shapes]
    kept = [device.keep_matrix(_matrix(shape, device)) for shape in load.shapes]
    inputs = [device.from_host(torch.randn(EXPANDED_ROWS, width).to(device.dtype)) for _, width in load.shapes]
    buffer = device.empty((max(math.prod(shape) for shape in load.shapes),), device.dtype)
    workspace = Workspace(device.torch_device)

    def by_codes() -> None:
        for rows, matrix in zip(inputs, codes, strict=True):
            device.linear(rows, matrix.expand(buffer, workspace))

    def by_kept() -> None:
        for rows, matrix in zip(inputs, kept, strict=True):
            device.linear(rows, matrix)

    seconds = usual_seconds({"codes": timed(device, by_codes), "kept": timed(device, by_kept)}, effort)
    return load.elements / max(seconds["codes"] - seconds["kept"], SHORTEST_S)


def _rates(device: Device, load: Load, sets: Sequence[Sequence[Matrix]], rows: Sequence[int], effort: Effort) -> Curve:
    flops: dict[int, float] = {}
    runs: dict[int, Run] = {}
    for count in rows:
        of_a_set = 2.0 * count * load.elements
        few = sets[: math.ceil(min(len(sets), load.run_flops / of_a_set))]
        flops[count] = of_a_set * len(few)
        runs[count] = timed(device, _multiply(device, load, few, count))
    seconds = usual_seconds(runs, effort)
    return Curve(tuple((float(count), flops[count] / seconds[count]) for count in rows))


def _multiply(device: Device, load: Load, sets: Sequence[Sequence[Matrix]], count: int) -> Callable[[], None]:
    inputs = [device.from_host(torch.randn(count, width).to(device.dtype)) for _, width in load.shapes]

    def work() -> None:
        for matrices in sets:
            for rows, weight in zip(inputs, matrices, strict=True):
                device.linear(rows, weight)

    return work


def _matrix(shape: Shape, device: Device) -> Tensor:
    rows, columns = shape
    return device.from_host(torch.randn(SEED_ROWS, columns).to(device.dtype).repeat(rows // SEED_ROWS, 1))


def _codes(shape: Shape, scheme: Scheme, device: Device) -> StoredMatrix:
    n_codes = math.prod(scheme.codes_shape(shape))
    seed = torch.randint(0, 256, (SEED_ROWS * shape[1],), dtype=torch.uint8)
    codes = seed.repeat(-(-n_codes // len(seed)))[:n_codes].view(scheme.codes_shape(shape))
    if scheme.bits == 8:
        codes = codes.view(torch.int8)
    scale = torch.full(scheme.scale_shape(shape), 2 / scheme.levels, dtype=torch.float16)
    minimum = torch.full_like(scale, -1.0)
    codes, scale, minimum = (device.from_host(part) for part in (codes, scale, minimum))
    return StoredMatrix((Quantised(codes, scale, minimum, shape, scheme),))
