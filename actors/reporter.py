"""A model actor's thread that tells the router how it does, and notices when the engine has died."""

import threading
import time
from collections.abc import Callable

import ray

from router.report import Report

from .names import NAMESPACE, router_actor_name

PERIOD_S = 0.5
HEARTBEAT_S = 2.0
"""A report is sent at least this often, so that silence means death (router.core.SILENCE_S)."""


class Reporter:
    """Sends cumulative counters whenever they change, at most every ``PERIOD_S``.

    The router is looked up by name each time, so a restarted one gets everything with the next report; while there
    is none, nothing is sent and nothing is lost.
    """

    def __init__(
        self, app: str, read: Callable[[], Report], alive: Callable[[], bool], on_death: Callable[[], None]
    ) -> None:
        self._router = router_actor_name(app)
        self._read, self._alive, self._on_death = read, alive, on_death
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="helios-reporter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        last, sent_s = None, 0.0
        while True:
            if not self._alive():
                self._on_death()
                return
            report, now_s = self._read(), time.monotonic()
            if (report != last or now_s - sent_s >= HEARTBEAT_S) and self._send(report):
                last, sent_s = report, now_s
            if self._stopped.wait(PERIOD_S):
                return

    def _send(self, report: Report) -> bool:
        try:
            router = ray.get_actor(self._router, namespace=NAMESPACE)
        except ValueError:  # there is no router at present
            return False
        router.report.remote(report)
        return True
