"""RouterActor: ``router.core.Router`` behind Ray calls, its performance table kept on disk."""

import asyncio
import copy
import logging
import time
from collections.abc import Sequence

from engine.checkpoint.store import home
from router.core import Decision, Router, Served, Snapshot
from router.pht import PerformanceTable
from router.report import Report
from router.selection import Objective
from router.store import CorruptTableError, load_table, save_table

from .failures import StoppingError

log = logging.getLogger(__name__)

SAVE_S = 1.0
"""The table is written at most this often; what a crash loses comes again with the replicas' next reports."""


class RouterActor:
    """Assigns requests to replicas. A plain class; ``lifecycle`` makes it a detached, named actor."""

    def __init__(self, app: str, served: tuple[Served, ...], objective: Objective) -> None:
        """Reads the app's table back. One that is corrupt is set aside, and the log says where."""
        self._configuration = (served, objective)
        self._path = home() / "state" / app / "pht.json"
        try:
            table = load_table(self._path)
        except CorruptTableError as error:
            log.error("%s; the router begins without evidence", error)
            table = PerformanceTable()
        self._router = Router(served, objective, table, time.monotonic)
        self._saving: asyncio.Task[None] | None = None
        self._closing = False

    async def configuration(self) -> tuple[tuple[Served, ...], Objective]:
        """What it was started with."""
        return self._configuration

    async def assign(self, model: str, request_id: str, avoid: Sequence[tuple[str, int]] = ()) -> Decision:
        """As ``Router.assign``. Raises ModelNotFoundError, OverloadedError, StoppingError."""
        if self._closing:
            raise StoppingError("the app is being stopped; send the request again when it is back")
        return self._router.assign(model, request_id, avoid)

    async def report(self, report: Report) -> None:
        if self._router.report(report) and (self._saving is None or self._saving.done()):
            self._saving = asyncio.create_task(self._save_later())

    async def failed(self, model: str, replica: int, epoch: int) -> None:
        self._router.failed(model, replica, epoch)

    async def snapshot(self) -> Snapshot:
        return self._router.snapshot()

    async def close(self) -> None:
        """Assign nothing more, so that streams which lose their replicas end with the reason and wait for none."""
        self._closing = True

    async def flush(self) -> None:
        """Write the table now. Raises OSError."""
        # A copy, since reports go on arriving while the file is written.
        await asyncio.to_thread(save_table, copy.deepcopy(self._router.table), self._path)

    async def _save_later(self) -> None:
        await asyncio.sleep(SAVE_S)
        try:
            await self.flush()
        except OSError as error:
            log.error("the performance table cannot be written to %s: %s; it is kept in memory", self._path, error)
