"""Router: knows the configured models, which replicas are alive and how busy, and assigns each request to one."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.errors import ModelNotFoundError, OverloadedError

from .pht import Figures, PerformanceTable
from .report import Report
from .selection import Candidate, Objective, choose

AUTO = "auto"
SILENCE_S = 10.0
"""A replica that has not reported for so long is taken for dead; replicas report at least every 2 s."""
GRACE_S = 2.0
"""Reports of a life that a caller found dead count again after so long: they were on the way before, or it lives."""
RECENT = 64

State = Literal["loading", "ready", "dead"]


@dataclass(frozen=True, slots=True)
class Served:
    """A model the router may assign requests to, as configured."""

    model: str
    fingerprint: str
    replicas: int


@dataclass(frozen=True, slots=True)
class Decision:
    request_id: str
    model: str
    replica: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    replica: int
    state: State
    running: int
    waiting: int
    """As last reported, with what was assigned since."""
    restarts: int = 0
    """Lives after the first that this router has heard of; each begins its counters anew."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    model: str
    replicas: tuple[ReplicaStatus, ...]
    figures: Figures
    assigned: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All there is to know of the router, for status pages and tests."""

    objective: Objective
    models: tuple[ModelStatus, ...]
    recent: tuple[Decision, ...]
    """The latest decisions, oldest first."""


@dataclass(frozen=True, slots=True)
class _Replica:
    state: State = "loading"
    epoch: int = 0
    heard_s: float = 0.0
    running: int = 0
    waiting: int = 0
    assigned: int = 0
    """Since the last report, which cannot have counted them all."""
    restarts: int = 0

    @property
    def load(self) -> int:
        return self.running + self.waiting + self.assigned


class Router:
    """Assigns requests. Not thread-safe: one thread or event loop owns it."""

    def __init__(
        self, served: Sequence[Served], objective: Objective, table: PerformanceTable, clock: Callable[[], float]
    ) -> None:
        """``clock`` gives seconds that never run backwards. Figures of a changed configuration are forgotten."""
        self.table = table
        table.keep_only({model.model: model.fingerprint for model in served})
        self._served = {model.model: model for model in served}
        self._objective: Objective = objective
        self._clock = clock
        self._replicas = {(model.model, index): _Replica() for model in served for index in range(model.replicas)}
        self._assigned = dict.fromkeys(self._served, 0)
        self._recent: deque[Decision] = deque(maxlen=RECENT)

    def assign(self, model: str, request_id: str, avoid: Sequence[tuple[str, int]] = ()) -> Decision:
        """Pick a replica for a request for ``model``, or for "auto". ``avoid`` is used only when nothing else is ready.

        Raises ModelNotFoundError for a model that is not configured, OverloadedError when none is ready.
        """
        name, reason = self._choose_model() if model == AUTO else (self._known(model), "asked for by name")
        ready = self._ready(name)
        index = min(ready, key=lambda i: ((name, i) in avoid, self._replicas[(name, i)].load, i), default=None)
        if index is None:
            states = ", ".join(f"replica {i} {self._state((name, i))}" for i in range(self._served[name].replicas))
            raise OverloadedError(f"model '{name}' is not ready ({states}); try again", retry_after_s=2.0)
        replica = self._replicas[(name, index)]
        self._replicas[(name, index)] = replace(replica, assigned=replica.assigned + 1)
        self._assigned[name] += 1
        if len(ready) > 1:
            reason += f"; replica {index} has the fewest requests ({replica.load})"
        decision = Decision(request_id, name, index, reason)
        self._recent.append(decision)
        return decision

    def report(self, report: Report) -> bool:
        """Take a replica's report; returns whether the table changed. Reports of unknown replicas are dropped."""
        key = (report.model, report.replica)
        replica = self._replicas.get(key)
        if replica is None or report.epoch < replica.epoch or self._just_failed(replica, report.epoch):
            return False
        restarts = replica.restarts + (0 < replica.epoch < report.epoch)
        self._replicas[key] = _Replica(
            "ready", report.epoch, self._clock(), report.running, report.waiting, restarts=restarts
        )
        return self.table.record(report)

    def failed(self, model: str, replica: int, epoch: int) -> None:
        """A caller found this life of a replica dead. The next life's first report makes it ready again."""
        key = (model, replica)
        known = self._replicas.get(key)
        if known is not None and known.epoch <= epoch:
            self._replicas[key] = _Replica("dead", epoch, self._clock(), restarts=known.restarts)

    def snapshot(self) -> Snapshot:
        models = tuple(
            ModelStatus(
                model=name,
                replicas=tuple(self._status(name, index) for index in range(served.replicas)),
                figures=self.table.figures(name),
                assigned=self._assigned[name],
            )
            for name, served in self._served.items()
        )
        return Snapshot(self._objective, models, tuple(self._recent))

    def _choose_model(self) -> tuple[str, str]:
        candidates = [
            Candidate(name, self.table.figures(name), self._assigned[name])
            for name in self._served
            if self._ready(name)
        ]
        if not candidates:
            names = ", ".join(self._served)
            raise OverloadedError(f"no model is ready (configured: {names}); try again", retry_after_s=2.0)
        choice = choose(candidates, self._objective)
        return choice.model, choice.reason

    def _known(self, model: str) -> str:
        if model not in self._served:
            names = ", ".join([*self._served, AUTO])
            raise ModelNotFoundError(f"model '{model}' is not served here; ask for one of: {names}")
        return model

    def _ready(self, model: str) -> list[int]:
        return [i for i in range(self._served[model].replicas) if self._state((model, i)) == "ready"]

    def _state(self, key: tuple[str, int]) -> State:
        replica = self._replicas[key]
        silent = replica.state == "ready" and self._clock() - replica.heard_s > SILENCE_S
        return "dead" if silent else replica.state

    def _status(self, model: str, index: int) -> ReplicaStatus:
        replica = self._replicas[(model, index)]
        waiting = replica.waiting + replica.assigned
        return ReplicaStatus(index, self._state((model, index)), replica.running, waiting, replica.restarts)

    def _just_failed(self, replica: _Replica, epoch: int) -> bool:
        return replica.state == "dead" and epoch == replica.epoch and self._clock() - replica.heard_s < GRACE_S
