"""An engine with requests, stepped by hand, and disks that fail under it."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.engine import Engine
from engine.kv_homes import StagedKV
from engine.llm import LLM
from engine.request import Completion, Delta, Request, SamplingParams
from tests.engine.test_parity import random_tokens

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
ALL_ON_DISK = {"disk": ["embedding", "layers.0-2", "head"]}
AMPLE = 10**8
PROMPTS = [random_tokens(length, seed=length) for length in (5, 30, 60)]
MANY = [random_tokens(length, seed=length) for length in (100, 90, 80, 70, 60, 50, 40, 30)]


class Served:
    """Requests in an engine, stepped by hand."""

    def __init__(self, engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> None:
        self.engine = engine
        self.requests = [Request(f"{id(self)}-{i}", tuple(prompt), params) for i, prompt in enumerate(prompts)]
        self.deltas: dict[str, list[Delta]] = {request.request_id: [] for request in self.requests}
        for request in self.requests:
            engine.add(engine.prepare(request, self.deltas[request.request_id].append))

    def finish(self) -> list[Completion]:
        for _ in range(1000):
            if not self.engine.has_work:
                break
            self.engine.step()
        return [Completion.gather(request, self.deltas[request.request_id]) for request in self.requests]


def ids(completions: list[Completion]) -> list[list[int]]:
    return [[token.id for token in completion.tokens] for completion in completions]


def expected(model: Path, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    with LLM(str(model), dtype="float32", threads=1, max_sequences=len(prompts)) as llm:
        return ids(llm.generate(prompts, params))


def failing(call: Callable[..., int], fails: Callable[[int], bool]) -> Callable[..., int]:
    """``call`` with EIO at the offsets that ``fails`` tells."""

    def transfer(fd: int, views: list[memoryview], offset: int) -> int:
        if fails(offset):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(fd, views, offset)

    return transfer


def with_kv_on_disk(load: Callable[..., Engine], model: Path, **fields: Any) -> tuple[Engine, StagedKV]:
    """An engine whose slots hold one long sequence, so that a sweep has several cohorts."""
    settings = {"memory_bytes": 2_000_000, "weights": ALL_ON_DISK, "kv_tokens": 0, "kv_disk_tokens": 1200}
    engine = load(model, **settings | {"context": 128, "prefill_rows": 200, "max_sequences": 8} | fields)
    home = engine._homes[-1]
    assert isinstance(home, StagedKV)
    return engine, home
