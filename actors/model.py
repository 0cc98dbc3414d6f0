"""ModelActor: one model's engine behind Ray calls. A plain class; ``lifecycle`` makes it a detached, named actor."""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Sequence

import ray

from engine.engine import Engine, EngineStats
from engine.errors import EngineDeadError, HeliosError, OverloadedError
from engine.loop import EngineLoop
from engine.request import Completion, Delta, Request, SamplingParams
from router.report import Report

from .config import ModelConfig
from .messages import Health, ModelInfo, Opened, by_request
from .outbox import Outbox
from .prompts import Prompt, Sampling, encode, sampling_params
from .reporter import Reporter
from .telemetry import Telemetry

log = logging.getLogger(__name__)

WAIT_S = 5.0
"""A poll that finds nothing returns after so long."""
LEASE_S = 20.0
"""An owner that has not polled for so long is gone, and its sequences are cancelled: a killed process cannot say so."""
FLUSH_S = 0.5
"""After the engine died, time for its last deltas to reach their readers before the process ends."""


class ModelActor:
    """Serves one replica of a model. A model that cannot be loaded stays up and says why to every call.

    (Failing in ``__init__`` instead would make Ray report its own error in the place of ours.)
    """

    def __init__(self, app: str, config: ModelConfig, replica: int) -> None:
        self._config, self._replica = config, replica
        self._epoch = time.time_ns()
        self._telemetry = Telemetry()
        self._outboxes: dict[str, Outbox] = {}
        self._leases: set[asyncio.Task[None]] = set()
        self._failure: HeliosError | None = None
        started_s = time.perf_counter()
        try:
            self._loop = EngineLoop(Engine.load(config.engine_config()))
        except HeliosError as error:
            log.error("model '%s' cannot be loaded: %s", config.name, error)
            self._failure = error
            return
        self._load_s = time.perf_counter() - started_s
        self._loop.start()
        self._reporter = Reporter(app, self._report, lambda: self._loop.alive, _end_process)
        self._reporter.start()

    async def fingerprint(self) -> str:
        """Of the configuration this actor was started with. Never fails, so that a bad model can be replaced."""
        return self._config.fingerprint()

    async def ready(self) -> ModelInfo:
        """Introduce the model. Every method from here on raises the HeliosError that kept the model from loading."""
        engine = self._running().engine
        return ModelInfo(
            name=self._config.name,
            replica=self._replica,
            epoch=self._epoch,
            fingerprint=self._config.fingerprint(),
            architecture=engine.spec.architecture,
            n_layers=engine.spec.n_layers,
            hidden_size=engine.spec.hidden_size,
            vocab_size=engine.spec.vocab_size,
            context=engine.context,
            dtype=str(engine.device.dtype).removeprefix("torch."),
            device=str(engine.device.torch_device),
            memory=self._loop.stats().memory,
            load_s=self._load_s,
            pid=os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
        )

    async def stats(self) -> EngineStats:
        return self._running().stats()

    async def tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt, as ``generate`` would use them. Raises InvalidRequestError."""
        return await asyncio.to_thread(encode, self._running().engine.tokenizer, prompt)

    async def generate(self, prompt: Prompt, params: Sampling = None, request_id: str | None = None) -> Completion:
        """Continue a prompt to its end. Raises InvalidRequestError, OverloadedError, EngineDeadError."""
        request, outbox = await self._request(prompt, params, request_id, ()), Outbox()
        self._submit(request, outbox)
        return await self._gathered(request, outbox)

    async def stream(
        self,
        prompt: Prompt,
        params: Sampling = None,
        request_id: str | None = None,
        generated: Sequence[int] = (),
    ) -> AsyncIterator[Opened | Delta]:
        """Continue a prompt step by step: ``Opened``, then deltas, the last with a finish_reason.

        A delta holds all that came since the one before. ``ray.cancel`` on the call cancels the sequence; merely
        dropping its generator does not, since Ray does not tell the actor. Raises as ``generate``.
        """
        request, outbox = await self._request(prompt, params, request_id, generated), Outbox()
        self._submit(request, outbox)
        try:
            yield self._opened(request)
            while outbox.open:
                for delta in by_request(await outbox.take(WAIT_S)):
                    yield delta
        finally:
            self._cancel_open(outbox)

    async def begin(
        self, owner: str, prompt: Prompt, params: Sampling, request_id: str, generated: Sequence[int] = ()
    ) -> Opened:
        """Begin a sequence whose deltas ``owner`` fetches with ``poll``, together with those of its other sequences.

        Raises InvalidRequestError, OverloadedError, EngineDeadError.
        """
        request = await self._request(prompt, params, request_id, generated)
        outbox = self._outboxes.get(owner)
        if outbox is None:
            outbox = self._outboxes[owner] = Outbox()
            lease = asyncio.create_task(self._watch(owner, outbox))
            self._leases.add(lease)
            lease.add_done_callback(self._leases.discard)
        outbox.touch()
        self._submit(request, outbox)
        return self._opened(request)

    async def poll(self, owner: str, epoch: int) -> tuple[Delta, ...]:
        """What an owner's sequences produced since its last poll, a delta for each; empty after ``WAIT_S`` of nothing.

        Raises EngineDeadError when the sequences are gone: the actor restarted since, or the owner's lease ran out.
        """
        outbox = self._outboxes.get(owner)
        if epoch != self._epoch or outbox is None:
            raise EngineDeadError("the sequences polled for are gone: this replica restarted, or cancelled them")
        return by_request(await outbox.take(WAIT_S))

    async def cancel(self, request_id: str) -> None:
        """End a sequence before the next sweep. One that has ended already stays as it is."""
        self._running().cancel(request_id)

    async def change_depth(self, depth: int | None) -> int:
        """Serve with the exit after so many layers, None for the whole model; returns the depth once it serves.

        What is lacking is read while requests go on. Raises ConfigError for a depth that is none, OutOfMemoryError if
        there is no room for it, CheckpointError if it cannot be read; all is as before then.
        """
        return await asyncio.wrap_future(self._running().change_depth(depth))

    async def park(self) -> None:
        """Give weights and KV back and stay warm; requests wait until ``change_depth``."""
        await asyncio.wrap_future(self._running().park())

    async def check(self, wait_s: float = 10.0) -> Health:
        """Generate a token, to see that the model does. A full queue that moves is healthy too, and so is a parked
        model."""
        if self._running().stats().depth == 0:
            return Health(True, 0.0, "parked")
        started_s, sweeps = time.perf_counter(), self._running().stats().sweeps
        probe, outbox = Request(f"check-{uuid.uuid4().hex}", (0,), SamplingParams(max_tokens=1)), Outbox()
        outbox.open.add(probe.request_id)
        try:
            # Past the telemetry: a check is no evidence of how the model serves.
            self._loop.submit(probe, outbox.put)
            async with asyncio.timeout(wait_s):
                await self._gathered(probe, outbox)
        except TimeoutError:
            reason = f"no token within {wait_s:g} s"
        except OverloadedError as error:
            reason = str(error)
            await asyncio.sleep(min(1.0, wait_s))
        except HeliosError as error:
            return Health(False, time.perf_counter() - started_s, str(error))
        else:
            return Health(True, time.perf_counter() - started_s, "generated one token")
        done = self._running().stats().sweeps - sweeps
        return Health(done > 0, time.perf_counter() - started_s, f"{reason}; {done} sweeps meanwhile")

    async def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, let those begun finish for up to ``drain_s`` seconds, and stop the engine."""
        if self._failure is None:
            self._reporter.stop()
            await asyncio.to_thread(self._loop.close, drain_s)

    def _running(self) -> EngineLoop:
        if self._failure:
            raise self._failure
        return self._loop

    async def _request(
        self, prompt: Prompt, params: Sampling, request_id: str | None, generated: Sequence[int]
    ) -> Request:
        # Encoding a long prompt takes longer than other calls should wait.
        ids = await self.tokenize(prompt)
        return Request(request_id or f"req-{uuid.uuid4().hex}", ids, sampling_params(params), tuple(generated))

    def _submit(self, request: Request, outbox: Outbox) -> None:
        def deliver(delta: Delta) -> None:
            self._telemetry.record(delta)
            outbox.put(delta)

        self._telemetry.begin(request.request_id)
        outbox.open.add(request.request_id)
        try:
            self._running().submit(request, deliver)
        except HeliosError:
            self._telemetry.forget(request.request_id)
            outbox.open.discard(request.request_id)
            raise

    async def _gathered(self, request: Request, outbox: Outbox) -> Completion:
        """Wait for a submitted request's end. Raises what ended it, if that was an error."""
        deltas: list[Delta] = []
        try:
            while outbox.open:
                deltas += await outbox.take(WAIT_S)
        finally:
            self._cancel_open(outbox)
        completion = Completion.gather(request, deltas)
        if completion.error:
            raise completion.error
        return completion

    def _opened(self, request: Request) -> Opened:
        return Opened(request.request_id, self._config.name, self._replica, self._epoch, request.prompt_ids)

    def _cancel_open(self, outbox: Outbox) -> None:
        for request_id in outbox.open:
            self._loop.cancel(request_id)

    async def _watch(self, owner: str, outbox: Outbox) -> None:
        while time.monotonic() - outbox.touched_s < LEASE_S:
            await asyncio.sleep(LEASE_S / 4)
        self._cancel_open(outbox)
        del self._outboxes[owner]

    def _report(self) -> Report:
        stats = self._loop.stats()
        counters = {self._loop.engine.spec.n_layers: self._telemetry.counters(stats)}
        return Report(self._config.name, self._replica, self._epoch, stats.running, stats.waiting, counters)


def _end_process() -> None:
    """The engine died: end the process, so that Ray starts a new one."""
    log.critical("the engine died; this actor ends and is restarted")
    time.sleep(FLUSH_S)
    os._exit(1)
