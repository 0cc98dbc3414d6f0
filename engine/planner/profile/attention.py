"""Attention as the engine does it: groups of a planner, which gather blocks of a pool and attend to them."""

import math
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from ...attention import AttentionGroup, AttentionPlanner, Span
from ...device import Device
from ...kv import BLOCK, KVFormat, KVLayout
from ...spec import ModelSpec
from ...tiers import Tier
from ..processor import Curve
from .timing import Effort, Run, timed, usual_seconds
from .toy import llama_spec

HEADS = ((32, 8), (16, 16))
"""Query and KV heads: four share one, or each has its own."""
HEAD_DIM = 64
LENGTHS = (128, 512, 2048)
SEQUENCES = 64
"""In one call at most."""
POOL_BYTES = 2**27
"""K and V that calls go through one after another, so that they come from memory and not from a cache."""
SEED = 2**20
"""Of its elements, those that are drawn; they are repeated."""
CHUNKS = ((16, 0, 32), (128, 0, 8), (512, 0, 2), (512, 1536, 2))
"""Positions of a chunk, which of the sequence's positions is its first, and how many such chunks make a run."""


class Bench:
    """A layer's KV in blocks, and what attends to them."""

    def __init__(self, n_heads: int, n_kv_heads: int, device: Device, memory: Tensor, call_bytes: int) -> None:
        """``memory`` holds the blocks, ``call_bytes`` is what one call gathers at most."""
        self.spec: ModelSpec = llama_spec(n_heads * HEAD_DIM, n_heads, n_kv_heads)
        self.device = device
        form = KVFormat(self.spec, device.dtype)
        self.position_bytes = form.block_bytes // BLOCK
        self.n_blocks = memory.nbytes // form.block_bytes
        tier = Tier("device", device.available_bytes(), device.empty)
        self._layout = KVLayout(form, max(1, call_bytes // form.block_bytes), tier, device)
        self._pool = memory[: math.prod(self._layout.pool_shape(self.n_blocks))].view(
            self._layout.pool_shape(self.n_blocks)
        )
        self._planner = AttentionPlanner(self._layout, device)

    def decode(self, sequences: int, length: int) -> tuple[Callable[[], None], int]:
        """Calls through the whole pool, of so many sequences with so many positions each; and how many calls."""
        per_call = sequences * (length // BLOCK)
        groups: list[AttentionGroup] = []
        for first in range(0, self.n_blocks - per_call + 1, per_call):
            spans = [
                # One position is missing in the last block, so there is a mask, as there nearly always is.
                Span(i, length - 2, 1, list(range(first + i * length // BLOCK, first + (i + 1) * length // BLOCK)))
                for i in range(sequences)
            ]
            groups += self._planner.plan(spans, [], None)
        return self._attend(groups, sequences), self.n_blocks // per_call

    def chunk(self, count: int, start: int, repeats: int) -> tuple[Callable[[], None], float]:
        """Chunks of so many positions, the first number ``start``; and the FLOPs of one."""
        blocks = list(range((start + count) // BLOCK))
        groups = self._planner.plan([], [Span(0, start, count, blocks)] * repeats, None)
        seen = count * start + count * (count + 1) / 2  # pairs of a query and a key
        return self._attend(groups, count), 4.0 * self.spec.q_size * seen

    def _attend(self, groups: Sequence[AttentionGroup], rows: int) -> Callable[[], None]:
        width = self.spec.q_size + 2 * self.spec.kv_size
        qkv = self.device.from_host(torch.randn(rows, width).to(self.device.dtype))

        def work() -> None:
            for group in groups:
                group.attend(qkv, self._layout, self._pool)

        return work


def attention_rates(device: Device, effort: Effort) -> tuple[Curve, Curve]:
    """KV bytes a second of decode by the bytes of one call, and FLOP/s of a prompt's chunks by the FLOPs of one.

    Each is the mean over grouped and multi-head attention, short and long sequences, as long as calls of all of them
    take together.
    """
    memory = device.empty((POOL_BYTES // device.dtype.itemsize,), device.dtype)
    memory.view(-1, SEED).copy_(device.from_host(torch.randn(SEED).to(device.dtype)))
    benches = [Bench(*heads, device, memory, effort.kv_bytes[-1]) for heads in HEADS]
    return _decode(benches, effort), _chunks(benches, effort)


def _decode(benches: Sequence[Bench], effort: Effort) -> Curve:
    runs: dict[tuple[int, int, int], Run] = {}
    moved: dict[tuple[int, int, int], int] = {}
    for size, (number, bench), length in product(effort.kv_bytes, enumerate(benches), LENGTHS):
        sequences, rest = divmod(size // bench.position_bytes, length)
        if 1 <= sequences <= SEQUENCES and not rest:
            work, calls = bench.decode(sequences, length)
            key = (size, number, length)
            runs[key], moved[key] = timed(bench.device, work), calls * size
    seconds = usual_seconds(runs, effort)
    points = []
    for size in effort.kv_bytes:
        keys = [key for key in runs if key[0] == size]
        if keys:
            points.append((float(size), sum(moved[key] for key in keys) / sum(seconds[key] for key in keys)))
    return Curve(tuple(points))


def _chunks(benches: Sequence[Bench], effort: Effort) -> Curve:
    runs: dict[tuple[int, int], Run] = {}
    flops: dict[tuple[int, int], float] = {}
    for (number, bench), (at, chunk) in product(enumerate(benches), enumerate(CHUNKS)):
        work, flops[number, at] = bench.chunk(*chunk)
        runs[number, at] = timed(bench.device, work)
    seconds = usual_seconds(runs, effort)
    points = []
    for at, (_, _, repeats) in enumerate(CHUNKS):
        done = sum(flops[number, at] for number in range(len(benches)))
        took_s = sum(seconds[number, at] for number in range(len(benches))) / repeats
        points.append((done / len(benches), done / took_s))
    return Curve(tuple(points))
