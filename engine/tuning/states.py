"""Hidden states of text, as heads are trained on them: at each exit, and what the last layer made of them."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch, Tile
from ..block import before_head
from ..build import Parts, build
from ..config import EngineConfig
from ..errors import CheckpointError, ConfigError
from ..kv import blocks_for
from ..passes.choose import source
from ..scheduler import Scheduler
from ..sequence import Sequence as Generation
from ..sweep import Sweep

ABOUT = "states.json"
FINAL = "final"
LIKELIEST = 12
"""Tokens of each position that the loss always has."""
ROWS = 2048
"""Positions of a sweep."""


@dataclass(frozen=True, slots=True)
class States:
    """States [N, H] in bfloat16 in a folder: ``layer`` of each exit, and the normalised ones before the LM head."""

    folder: Path
    layers: tuple[int, ...]
    lengths: tuple[int, ...]
    """Of the texts, in the order in which they are kept."""
    hidden_size: int

    @property
    def count(self) -> int:
        """Positions."""
        return sum(self.lengths)

    def of(self, layer: int) -> Tensor:
        """After so many layers, as a map of the file."""
        return self._map(f"{layer}")

    @property
    def final(self) -> Tensor:
        """The last layer's, normalised: times the LM head they are the model's own logits."""
        return self._map(FINAL)

    @classmethod
    def open(cls, folder: Path) -> "States | None":
        """What ``collect`` left there, if it was done; None if it was not begun. Raises CheckpointError for less."""
        about = folder / ABOUT
        if not about.is_file():
            return None
        try:
            content = json.loads(about.read_text(encoding="utf-8"))
            found = cls(folder, tuple(content["layers"]), tuple(content["lengths"]), content["hidden_size"])
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(f"{about} is damaged; remove {folder} and collect the states again") from None
        for name in (*map(str, found.layers), FINAL):
            path = folder / f"{name}.bf16"
            if not path.is_file() or path.stat().st_size != found.count * found.hidden_size * 2:
                raise CheckpointError(f"{path} is not whole; remove {folder} and collect the states again")
        return found

    def _map(self, name: str) -> Tensor:
        data = np.memmap(
            self.folder / f"{name}.bf16", dtype=np.int16, mode="c"
        )  # torch wants memory that may be written to
        return torch.from_numpy(np.asarray(data)).view(torch.bfloat16).view(self.count, self.hidden_size)

    def likeliest(self, lm_head: Tensor, progress: Callable[[int], None] | None = None) -> Tensor:
        """The tokens that the model finds likeliest, the best first, [N, LIKELIEST]; found once, then kept too.

        ``lm_head`` is the model's, [V, H]; ``progress`` is told of positions done.
        """
        path = self.folder / "likeliest.i32"
        if not path.is_file() or path.stat().st_size != self.count * LIKELIEST * 4:
            found = torch.empty(self.count, LIKELIEST, dtype=torch.int32)
            for start in range(0, self.count, ROWS):
                logits = self.final[start : start + ROWS].to(lm_head.dtype) @ lm_head.T
                found[start : start + ROWS] = logits.topk(LIKELIEST, -1).indices.int()
                if progress:
                    progress(min(start + ROWS, self.count))
            found.numpy().tofile(path.with_suffix(".writing"))
            path.with_suffix(".writing").replace(path)
        return torch.from_numpy(np.fromfile(path, dtype=np.int32)).view(self.count, LIKELIEST)


class _Keep:
    """Sink: appends states to a file."""

    def __init__(self, path: Path, finish: Callable[[Tensor], Tensor] = lambda hidden: hidden) -> None:
        self._file, self._finish = path.open("wb"), finish
        self.lengths: list[int] = []
        """Of the texts that were taken."""

    def take(self, tile: Tile, hidden: Tensor) -> None:
        self.lengths += [share.count for cohort in tile.cohorts for share in cohort.shares]
        kept = self._finish(hidden).to("cpu", torch.bfloat16).contiguous()
        self._file.write(kept.view(torch.int16).numpy().data)

    def result(self, batch: Batch) -> Tensor:
        """Nothing: the states are in the file."""
        return torch.empty(0)

    def close(self) -> None:
        self._file.close()


def collect(
    config: EngineConfig,
    layers: Sequence[int],
    windows: Iterable[Sequence[int]],
    folder: Path,
    progress: Callable[[int], None] | None = None,
) -> States:
    """Take windows of tokens, each a text of its own, through the whole model. ``progress`` is told of positions done.

    Raises ConfigError for a folder that cannot be made, as ``build.build``, and OSError as the disk does.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"states cannot be kept in {folder}: {error.strerror}; choose another work folder") from None
    parts = build(replace(config, depth=None, prefill_rows=ROWS, max_sequences=ROWS))
    spec = parts.spec
    sinks = {layer: _Keep(folder / f"{layer}.bf16") for layer in layers}
    last = _Keep(folder / f"{FINAL}.bf16", lambda hidden: before_head(spec, parts.weights.before_head, hidden))
    count = 0
    try:
        for number, batch in enumerate(_batches(parts, windows)):
            scheduler = Scheduler(parts.homes, range(spec.n_layers), ROWS, ROWS)
            for sequence in batch:
                scheduler.add(sequence)
            while shares := scheduler.schedule():
                wanted = [replace(share, logit_rows=0) for share in shares]
                parts.executor.run(Sweep(number, range(spec.n_layers), wanted, source(parts), last, sinks))
                count += sum(share.count for share in shares)
                for share in shares:
                    if share.logit_rows:
                        scheduler.remove(share.sequence)
                if progress:
                    progress(count)
    finally:
        for sink in (*sinks.values(), last):
            sink.close()
        parts.close()
    about = {"layers": list(layers), "lengths": last.lengths, "hidden_size": spec.hidden_size}
    (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")
    return States(folder, tuple(layers), tuple(last.lengths), spec.hidden_size)


def _batches(parts: Parts, windows: Iterable[Sequence[int]]) -> Iterable[list[Generation]]:
    """As many at a time as the KV cache holds and one sweep takes, so that every text is kept in one piece."""
    room = sum(home.pool.n_blocks for home in parts.homes) // 2
    batch: list[Generation] = []
    blocks = rows = 0
    for number, window in enumerate(windows):
        needed = blocks_for(len(window) + 1)
        if batch and (blocks + needed > room or rows + len(window) > ROWS):
            yield batch
            batch, blocks, rows = [], 0, 0
        batch.append(Generation.silent(f"window-{number}", window, parts.spec.n_layers))
        blocks, rows = blocks + needed, rows + len(window)
    if batch:
        yield batch
