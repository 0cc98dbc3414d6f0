"""Virtual time: one thread that computes or waits, and links that carry one transfer after another beside it."""

from dataclasses import dataclass

from ...storage.direct import PIECE_BYTES


@dataclass(slots=True)
class Busy:
    """A resource did something from one second to another."""

    resource: str
    start_s: float
    end_s: float
    what: str


@dataclass(slots=True)
class _Reading:
    """How much a link's traffic slows down the computing thread beside it."""

    free_s: float = 0.0
    share: float = 0.0


class Clock:
    """The time of the thread that computes. Everything that took place is in ``timeline``."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timeline: list[Busy] = []
        self._beside = _Reading()

    def compute(self, seconds: float, resource: str, what: str) -> None:
        """Spend so long computing, and as much longer as the reading beside it takes processor time away."""
        overlap = min(seconds, max(0.0, self._beside.free_s - self.now_s))
        self.spend(seconds + overlap * self._beside.share, resource, what)

    def spend(self, seconds: float, resource: str, what: str) -> None:
        """Spend so long on something."""
        if seconds > 0:
            self._note(Busy(resource, self.now_s, self.now_s + seconds, what))
            self.now_s += seconds

    def wait_until(self, second: float) -> None:
        """Wait, if that is not past already."""
        if second > self.now_s:
            self._note(Busy("waiting", self.now_s, second, ""))
            self.now_s = second

    def busy_beside(self, free_s: float, share: float) -> None:
        """Until ``free_s`` transfers take ``share`` of the processor's time."""
        if free_s > self._beside.free_s:
            self._beside = _Reading(free_s, share)

    def carried(self, busy: Busy) -> None:
        """Note what a link did."""
        self._note(busy)

    def _note(self, busy: Busy) -> None:
        last = self.timeline[-1] if self.timeline else None
        if last and last.resource == busy.resource and last.what == busy.what and last.end_s >= busy.start_s:
            last.end_s = max(last.end_s, busy.end_s)
        else:
            self.timeline.append(busy)


class Link:
    """A disk or a bus: one transfer at a time, first come first served."""

    def __init__(
        self,
        clock: Clock,
        name: str,
        read: float,
        write: float | None = None,
        *,
        cpu_s: float = 0.0,
        latency_s: float = 0.0,
    ) -> None:
        """``read`` and ``write`` are bytes a second in pieces of PIECE_BYTES, ``cpu_s`` the processor's seconds for a
        byte read, ``latency_s`` what the smallest transfer takes."""
        self._clock, self._name = clock, name
        self._rates = (read, read if write is None else write)
        self._share = read * cpu_s
        self._latency_s = latency_s
        self.free_s = 0.0
        self.bytes = 0

    def carry(self, n_bytes: int, start_s: float, what: str, store: bool = False) -> float:
        """When so many bytes are there that can begin at ``start_s``."""
        rate = self._rates[store]
        if n_bytes == 0:
            return start_s
        begin = max(start_s, self.free_s)
        waits_s = self._latency_s * max(0.0, 1 - n_bytes / PIECE_BYTES)
        self.free_s = begin + waits_s + n_bytes / rate
        self.bytes += n_bytes
        self._clock.carried(Busy(f"{self._name} {'write' if store else 'read'}", begin, self.free_s, what))
        if self._share and not store:
            self._clock.busy_beside(self.free_s, self._share)
        return self.free_s
