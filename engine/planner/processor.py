"""What multiplies, as the planner sees it: rates by size."""

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..spec import ModelSpec

PRODUCTS = ("bfloat16", "float16", "float32", "int4", "int8")
"""Kinds of weights that products are known for; the packed ones multiply 16-bit activations without expanding."""
PACKED = ("int4", "int8")
SMALL, LARGE = 900_000, 12_000_000
"""Elements of a matrix of a model of 100 million weights, and of one of 1 billion and more."""
RATES = ("memory_bytes_s", "expand_elements_s", "layer_s", "sweep_s", "row_s")
"""Figures of a processor that are single numbers."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A rate that depends on a size: known at some sizes, between them a straight line on logarithmic axes, beyond them
    the nearest known value."""

    points: tuple[tuple[float, float], ...]
    """(size, rate), sizes rising."""

    def __call__(self, size: float) -> float:
        sizes = [point[0] for point in self.points]
        at = bisect.bisect_left(sizes, size)
        if at == 0 or at == len(sizes):
            return self.points[min(at, len(sizes) - 1)][1]
        (x0, y0), (x1, y1) = self.points[at - 1], self.points[at]
        share = math.log(size / x0) / math.log(x1 / x0)
        return y0 * math.pow(y1 / y0, share)


SAME = Curve(((1.0, 1.0),))


def small_bytes(spec: ModelSpec, rows: int, itemsize: int) -> int:
    """What a layer's small operations are counted as: its products' inputs and outputs, read or written twice."""
    widths = 2 * (spec.q_size + spec.kv_size) + 4 * spec.hidden_size + (3 if spec.gated_mlp else 2) * spec.mlp_size
    return 2 * rows * widths * itemsize


@dataclass(frozen=True, slots=True)
class Processor:
    """What multiplies: a GPU, or the cores of a host. Rates are of the whole of it."""

    products: Mapping[str, Curve]
    """FLOP/s of ``rows`` times a weight matrix that comes from memory, by rows; for some of PRODUCTS."""
    decode_attention: Curve
    """KV bytes a second that decode attends to, gathering included, by the KV bytes of one call."""
    chunk_attention: Curve
    """FLOP/s of a prompt's attention, by the FLOPs of one call: 4 * head_dim for each query head and each pair of a
    position and one it sees."""
    memory_bytes_s: float
    """Bytes a second of what norms, rotations, additions and activations read and write, counted by
    ``small_bytes``."""
    expand_elements_s: float
    """Elements a second from 4-bit codes to the compute dtype."""
    layer_s: float
    """Seconds of a layer's small operations, whatever the rows."""
    sweep_s: float
    """Seconds of a sweep beside its layers: scheduling, index tensors, sampling."""
    row_s: float = 0.0
    """Of that, for each sequence in the sweep."""
    as_read: Curve = SAME
    """Rate of products by weights as they lie in the checkpoint to that by weights that are kept, by rows."""
    small: Curve = SAME
    """Rate of products by matrices of SMALL elements to that by matrices of LARGE ones, by rows."""

    def product_s(self, kind: str, rows: int, elements: int, kept: bool = True) -> float:
        """Seconds of a product with a matrix of so many elements; ``kept`` is in the layout that is fastest for it."""
        rate = self.products[kind](rows)
        if kind not in PACKED and not kept:
            rate *= self.as_read(rows)
        share = math.log(LARGE / max(elements, 1)) / math.log(LARGE / SMALL)
        rate *= math.pow(self.small(rows), min(1.0, max(0.0, share)))
        return 2 * rows * elements / rate
