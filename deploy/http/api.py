"""The routes. ``build_api`` makes the ASGI application; everything it needs is given to it."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine.errors import HeliosError

from ..openai.errors import ErrorReply, reply_to, reply_to_status
from ..openai.protocol import ChatRequest, CompletionRequest
from .service import Service

_LOG = logging.getLogger(__name__)
_ROUTES = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health, GET /status, GET /docs"


def build_api(service: Service) -> FastAPI:
    """The HTTP interface of ``service``."""
    api = FastAPI(title="Helios", description="OpenAI-compatible language model serving.", redoc_url=None)
    _add_generation(api, service)
    _add_information(api, service)
    _add_errors(api)
    return api


def _add_generation(api: FastAPI, service: Service) -> None:
    # The bodies are checked by the protocol itself, which names what is wrong in the API's own error shape; the schema
    # is only shown.
    @api.post("/v1/completions", openapi_extra=_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await service.completions(request)

    @api.post("/v1/chat/completions", openapi_extra=_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        return await service.chat(request)


def _add_information(api: FastAPI, service: Service) -> None:
    @api.get("/")
    async def index() -> dict[str, str]:
        return {"helios": f"an OpenAI-compatible server: {_ROUTES}"}

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        return service.models()

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return service.model(name)

    @api.get("/health")
    async def health() -> JSONResponse:
        report = await service.health()
        return JSONResponse(report, status_code=200 if report["ok"] else 503)

    @api.get("/status")
    async def status() -> JSONResponse:
        return JSONResponse(await service.status())


def _add_errors(api: FastAPI) -> None:
    @api.exception_handler(HeliosError)
    async def refused(request: Request, error: HeliosError) -> JSONResponse:  # noqa: ARG001
        return _response(reply_to(error))

    @api.exception_handler(HTTPException)
    async def framework(request: Request, error: HTTPException) -> JSONResponse:
        reply = reply_to_status(error.status_code, request.method, request.url.path, error.headers)
        return _response(reply)

    @api.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> JSONResponse:
        _LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _response(reply_to(error))


def _response(reply: ErrorReply) -> JSONResponse:
    return JSONResponse(reply.body(), status_code=reply.status, headers=dict(reply.headers))


def _schema(kind: type[CompletionRequest | ChatRequest]) -> dict[str, Any]:
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
