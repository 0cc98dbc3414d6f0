"""What a model actor measures about its requests, and the cumulative counters it reports to the router."""

import threading
import time
from dataclasses import dataclass

from engine.engine import EngineStats
from engine.request import Delta
from router.report import Counters


@dataclass(slots=True)
class _Times:
    begun_s: float
    first_s: float | None = None
    tokens: int = 0


class Telemetry:
    """Times requests from submission to last token. ``begin`` and ``record`` may run on different threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, _Times] = {}
        self._requests = 0
        self._ttft_s = self._decode_s = 0.0
        self._decode_tokens = 0

    def begin(self, request_id: str) -> None:
        with self._lock:
            self._open[request_id] = _Times(time.perf_counter())

    def forget(self, request_id: str) -> None:
        """The request was refused."""
        with self._lock:
            self._open.pop(request_id, None)

    def record(self, delta: Delta) -> None:
        """Note a delta's arrival. Only requests that ran to their end count: others say little about speed."""
        now_s = time.perf_counter()
        with self._lock:
            times = self._open.get(delta.request_id)
            if times is None:
                return
            if delta.tokens and times.first_s is None:
                times.first_s = now_s
            times.tokens += len(delta.tokens)
            if delta.finish_reason is None:
                return
            del self._open[delta.request_id]
            if delta.finish_reason in ("stop", "length") and times.first_s is not None:
                self._requests += 1
                self._ttft_s += times.first_s - times.begun_s
                self._decode_s += now_s - times.first_s
                self._decode_tokens += times.tokens - 1

    def counters(self, stats: EngineStats) -> Counters:
        """Everything since the actor started. Token sums are the engine's and include unfinished requests."""
        with self._lock:
            return Counters(
                requests=self._requests,
                tokens=stats.generated_tokens,
                ttft_s=self._ttft_s,
                decode_s=self._decode_s,
                decode_tokens=self._decode_tokens,
                sum_logprob=stats.sum_logprob,
                sum_confidence=stats.sum_confidence,
                busy_s=stats.busy_s,
            )
