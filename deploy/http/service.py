"""What the routes do: requests checked and begun, models listed, health and status asked for."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from actors.config import AppConfig
from actors.session import Session
from engine.errors import InvalidRequestError, ModelNotFoundError
from engine.request import SamplingParams

from ..openai.body import decode_json
from ..openai.messages import ChatMessage
from ..openai.protocol import AUTO, ChatRequest, CompletionRequest, parse
from ..openai.responses import ChatShape, Shape, TextShape
from .admission import Slots, read_body
from .answer import Answer, Work
from .status import HealthCheck, status
from .vocabularies import Vocabularies

Prompt = str | tuple[int, ...] | tuple[ChatMessage, ...]


class Service:
    """One app over HTTP. Belongs to one event loop."""

    def __init__(self, config: AppConfig, session: Session) -> None:
        self._config = config
        self._session = session
        self._slots = Slots(config.http.max_queued)
        self._vocabularies = Vocabularies({model.name: model.path for model in config.models})
        self._fingerprints = {model.name: f"fp_{model.fingerprint()}" for model in config.models}
        self._health = HealthCheck(session.directory)
        self._started = int(time.time())

    async def completions(self, request: Request) -> Response:
        body = parse(CompletionRequest, await self._json(request))
        return self._answer(body, [_nonempty(prompt) for prompt in body.prompt], TextShape)

    async def chat(self, request: Request) -> Response:
        body = parse(ChatRequest, await self._json(request))
        return self._answer(body, [body.messages], ChatShape)

    def models(self) -> dict[str, Any]:
        """Every model by its name, and "auto", which leaves the choice to the router."""
        return {"object": "list", "data": [self.model(name) for name in self._names()]}

    def model(self, name: str) -> dict[str, Any]:
        """Raises ModelNotFoundError with the names there are."""
        if name not in self._names():
            raise ModelNotFoundError(f"model '{name}' is not served here; ask for one of: {', '.join(self._names())}")
        return {"id": name, "object": "model", "created": self._started, "owned_by": self._config.app}

    async def health(self) -> dict[str, Any]:
        """``ok`` when at least one model generates."""
        return await self._health.report()

    async def status(self) -> dict[str, Any]:
        streams = {"open": self._slots.taken, "limit": self._slots.limit}
        return {"app": self._config.app, "streams": streams, **await status(self._session.directory)}

    def _names(self) -> list[str]:
        return [*self._fingerprints, AUTO]

    async def _json(self, request: Request) -> Any:
        return decode_json(await read_body(request, self._config.http.max_body_bytes))

    def _answer(self, body: CompletionRequest | ChatRequest, prompts: Sequence[Prompt], kind: type[Shape]) -> Answer:
        self.model(body.model)
        params = body.sampling_params()
        work = Work(
            streams=[self._session.stream(prompt, params, model=body.model) for prompt in prompts],
            shape=self._shape(kind, params),
            streaming=bool(body.stream),
            include_usage=body.include_usage,
            timeout_s=self._config.http.request_timeout_s,
        )
        return Answer(work, self._slots)

    def _shape(self, kind: type[Shape], params: SamplingParams) -> Callable[[str], Awaitable[Shape]]:
        async def shape(model: str) -> Shape:
            vocabulary = None if params.logprobs is None else await self._vocabularies.of(model)
            return kind(model, self._fingerprints[model], vocabulary)

        return shape


def _nonempty(prompt: str | tuple[int, ...]) -> str | tuple[int, ...]:
    if not prompt:
        raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
    return prompt
