"""Directory: finds an app's actors by name and asks its router, which may be away for a while."""

import asyncio
from typing import Any

import ray

from engine.errors import ModelNotFoundError, OverloadedError
from router.core import AUTO, Decision, Snapshot

from .failures import ReplicaLostError, told_apart
from .messages import Health, ModelInfo
from .names import NAMESPACE, app_of, model_actor_name, parse_actor_name, router_actor_name

ROUTER_REPLY_S = 5.0
"""A router that has not answered in so long is away."""


def actor_names(app: str | None = None) -> list[str]:
    """Names of all live actors of ours, or of one app's, sorted."""
    named = ray.util.list_named_actors(all_namespaces=True)
    ours = [entry["name"] for entry in named if entry["namespace"] == NAMESPACE]
    return sorted(name for name in ours if (app_of(name) == app if app else app_of(name)))


class Directory:
    """One app's actors. Ray is connected already."""

    def __init__(self, app: str) -> None:
        self.app = app
        self._router: Any = None
        self._turn = 0

    async def assign(self, model: str, request_id: str) -> Decision:
        """Have the router assign a request. While it is away a model asked for by name is reached directly.

        Raises ModelNotFoundError; ReplicaLostError when nothing can take the request now, but may soon.
        """
        try:
            decision: Decision = await self._ask_router("assign", model, request_id)
        except OverloadedError as error:
            raise ReplicaLostError(str(error)) from None
        except ReplicaLostError:
            if model == AUTO:
                raise
            return await self._direct(model, request_id)
        return decision

    def failed(self, model: str, replica: int, epoch: int) -> None:
        """Tell the router that this life of a replica is over; if it is away it finds out by itself."""
        if self._router is not None:
            self._router.failed.remote(model, replica, epoch)

    async def snapshot(self) -> Snapshot:
        """What the router knows. Raises ReplicaLostError while it is away."""
        snapshot: Snapshot = await self._ask_router("snapshot")
        return snapshot

    async def replicas(self) -> list[tuple[str, int]]:
        """(model, replica) of every model actor of the app."""
        parsed = [parse_actor_name(name) for name in await asyncio.to_thread(actor_names, self.app)]
        return [entry[1:] for entry in parsed if entry]

    def model_actor(self, model: str, replica: int) -> Any:
        """The handle of a model actor. Raises ReplicaLostError when there is none of that name."""
        return _actor(model_actor_name(self.app, model, replica))

    async def info(self, model: str, replica: int) -> ModelInfo:
        """How a replica introduces itself. Raises its HeliosError if it could not load, ReplicaLostError."""
        try:
            info: ModelInfo = await self.model_actor(model, replica).ready.remote()
        except Exception as error:
            raise told_apart(error) from None
        return info

    async def check(self, model: str, replica: int, wait_s: float = 10.0) -> Health:
        """Have a replica generate a token. Never raises: one that cannot be reached is not healthy."""
        try:
            async with asyncio.timeout(wait_s + 1.0):
                health: Health = await self.model_actor(model, replica).check.remote(wait_s)
        except TimeoutError:
            return Health(False, wait_s, f"no answer within {wait_s:g} s")
        except Exception as error:  # the question is whether it works, and it does not
            return Health(False, 0.0, str(told_apart(error)))
        return health

    async def _ask_router(self, method: str, *args: Any) -> Any:
        try:
            if self._router is None:
                self._router = _actor(router_actor_name(self.app))
            async with asyncio.timeout(ROUTER_REPLY_S):
                return await getattr(self._router, method).remote(*args)
        except TimeoutError:
            self._router = None
            raise ReplicaLostError(f"the router of '{self.app}' does not answer") from None
        except Exception as error:
            cause = told_apart(error)
            if isinstance(cause, ReplicaLostError):
                self._router = None  # a new one has another handle
            raise cause from None

    async def _direct(self, model: str, request_id: str) -> Decision:
        replicas = [replica for name, replica in await self.replicas() if name == model]
        if not replicas:
            raise ModelNotFoundError(f"no actor of app '{self.app}' serves a model '{model}'")
        self._turn += 1
        replica = replicas[self._turn % len(replicas)]
        return Decision(request_id, model, replica, "the router is away; reached by name")


def _actor(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        raise ReplicaLostError(f"there is no actor '{name}' at present") from None
