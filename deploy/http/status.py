"""What is known of an app's models now: whether they generate, how busy they are, what they hold."""

import asyncio
import time
from dataclasses import asdict
from typing import Any

from actors.directory import Directory
from actors.failures import told_apart
from actors.messages import Health
from engine.errors import HeliosError

FRESH_S = 2.0
"""A health report is given to everyone who asks within so long: a check costs a sweep, and probes come in crowds."""
CHECK_S = 10.0
STATS_S = 2.0


class HealthCheck:
    """Has every replica generate a token, one check at a time."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._lock = asyncio.Lock()
        self._report: dict[str, Any] = {}
        self._made_s = float("-inf")

    async def report(self) -> dict[str, Any]:
        """``ok`` is true when at least one replica generates; ``replicas`` says why each other does not."""
        async with self._lock:
            if time.monotonic() - self._made_s > FRESH_S:
                self._report = await self._check()
                self._made_s = time.monotonic()
            return self._report

    async def _check(self) -> dict[str, Any]:
        places = await self._directory.replicas()
        checks = await asyncio.gather(*(self._directory.check(*place, CHECK_S) for place in places))
        replicas = [_entry(place, health) for place, health in zip(places, checks, strict=True)]
        return {"ok": any(health.ok for health in checks), "replicas": replicas}


def _entry(place: tuple[str, int], health: Health) -> dict[str, Any]:
    return {"model": place[0], "replica": place[1], **asdict(health)}


async def status(directory: Directory) -> dict[str, Any]:
    """The router's snapshot, with what each replica says of itself. Raises nothing for a part that does not answer."""
    try:
        snapshot = asdict(await directory.snapshot())
    except HeliosError as error:
        return {"error": str(error), "models": []}
    places = [(model["model"], replica) for model in snapshot["models"] for replica in model["replicas"]]
    details = await asyncio.gather(*(_details(directory, name, replica["replica"]) for name, replica in places))
    for (_, replica), detail in zip(places, details, strict=True):
        replica |= detail
    return snapshot


async def _details(directory: Directory, model: str, replica: int) -> dict[str, Any]:
    """A replica's own counters. One that is loading, dead or busy must not hold up the others' status."""
    try:
        async with asyncio.timeout(STATS_S):
            actor = directory.model_actor(model, replica)
            info, stats = await asyncio.gather(actor.ready.remote(), actor.stats.remote())
    except TimeoutError:
        return {"error": f"no answer within {STATS_S:g} s"}
    except Exception as error:  # said in the status, which is what a status is for
        return {"error": str(told_apart(error))}
    return {"info": asdict(info), "stats": asdict(stats)}
