"""Boundary states: shallow layers now and deep layers later give what one sweep through all of them gives."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.batch import Share
from engine.boundary import BoundaryStates
from engine.errors import OutOfMemoryError
from engine.passes.choose import sink, source
from engine.storage.spill import SpillFile, SpillMemory
from engine.storage.transfer import Threads
from engine.sweep import Sweep
from tests.engine.homes import cpu_tier
from tests.engine.sweeps import Bench

LENGTHS = (3, 40, 70)


def store(place: str, bench: Bench, folder: Path, n_blocks: int = 12) -> BoundaryStates:
    width, dtype = bench.parts.spec.hidden_size, torch.float32
    if place == "device":
        return BoundaryStates.resident(cpu_tier(), width, dtype, n_blocks)
    size = n_blocks * 16 * width * dtype.itemsize
    spill = SpillMemory(torch.empty(size, dtype=torch.uint8)) if place == "host" else SpillFile(folder, size, width * 4)
    slots = [bench.parts.device.open_slot(2**16) for _ in range(2)]
    return BoundaryStates.staged(spill, slots, Threads(), width, dtype, n_blocks)


@pytest.mark.parametrize("place", ["device", "host", "disk"])
@pytest.mark.parametrize("tile_rows", [1024, 32])
def test_deep_layers_go_on_from_kept_states(
    tiny_model: Callable[[str], Path], tmp_path: Path, place: str, tile_rows: int
) -> None:
    bench = Bench(tiny_model("llama"), tile_rows=tile_rows)
    parts, depth = bench.parts, bench.parts.spec.n_layers
    texts = [[5 + (11 * i + n) % 300 for i in range(n)] for n in LENGTHS]
    expected = [bench.logits(text) for text in texts]
    kept = store(place, bench, tmp_path)
    sequences = [bench.sequence(text) for text in texts]
    for step in (32, 32, 32):  # shallow layers in chunks
        shares = []
        for sequence in sequences:
            start = sequence.kv.of(range(1))
            count = min(step, len(sequence.tokens) - start)
            if count:
                shares.append(Share(sequence, start, count))
        parts.executor.run(Sweep(0, range(1), shares, source(parts), kept))
    assert all(sequence.kv.of(range(1, depth)) == 0 for sequence in sequences)
    done = [0] * len(sequences)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(done[i] < len(text) for i, text in enumerate(texts)):  # then the deep ones, in other chunks
        shares, owners = [], []
        for i, sequence in enumerate(sequences):
            count = min(25, len(sequence.tokens) - done[i])
            if count:
                shares.append(Share(sequence, done[i], count, count))
                owners.append(i)
                done[i] += count
        out = parts.executor.run(Sweep(1, range(1, depth), shares, kept, sink(parts)))
        for i, part in zip(owners, out.split([share.count for share in shares]), strict=True):
            logits[i].append(part)
    for got, wanted in zip(logits, expected, strict=True):
        torch.testing.assert_close(torch.cat(got), wanted, rtol=1e-4, atol=1e-4)
    for sequence in sequences:
        kept.forget(sequence)
    assert kept.pool.free_blocks == 12
    kept.close()
    assert not list(tmp_path.iterdir())


def test_a_store_that_is_full_says_so(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    bench = Bench(tiny_model("llama"))
    kept = store("device", bench, tmp_path, n_blocks=2)
    share = Share(bench.sequence(list(range(5, 45))), 0, 40)
    with pytest.raises(OutOfMemoryError, match="3 blocks were asked for and 2 of 2 are free"):
        bench.parts.executor.run(Sweep(0, range(1), [share], source(bench.parts), kept))
