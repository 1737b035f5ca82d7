"""Routes that tell of the server: models, health, version, load, memory, metrics."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vmserve.errors import InvalidRequestError
from vmserve.server.body import read_json
from vmserve.server.chat import ChatService
from vmserve.server.completions import CompletionService
from vmserve.server.context import ServerContext
from vmserve.server.errors import ApiError
from vmserve.server.protocol import ChatCompletionRequest, CompletionRequest
from vmserve.server.wire import JSON_TYPE, dump_json
from vmserve.version import __version__

__all__ = ["InfoService", "InvocationService"]


class InfoService:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def health(self, request: Request) -> Response:
        """200 without a body while the engine runs; 503 from its death or a shutdown on."""
        if self._context.engine.errored:
            raise ApiError(503, "The engine has stopped and cannot serve requests.")
        return Response()

    async def version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def load(self, request: Request) -> Response:
        """The generation requests now being served, streams until their last byte."""
        return _json({"server_load": self._context.lifecycle.num_active})

    async def models(self, request: Request) -> Response:
        names = self._context.config.served_model_names
        return _json({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._context.served_name(name)
        return _json(self._card(name))

    async def kv(self, request: Request) -> Response:
        """The engine's figures: queues, pages, slots and what memory they take."""
        return _json(await self._context.engine.fetch_stats())

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        await self._context.engine.fetch_stats()
        body, media_type = self._context.telemetry.render(self._context)
        return Response(body, media_type=media_type)

    def _card(self, name: str) -> dict[str, Any]:
        config = self._context.config
        return {
            "id": name,
            "object": "model",
            "created": self._context.created,
            "owned_by": "vmserve",
            "root": config.model_name,  # never a path that was not given as a name
            "max_model_len": self._context.max_model_len,
        }


class InvocationService:
    """``POST /invocations``: whatever the body has decides which route serves it."""

    def __init__(self, completions: CompletionService, chat: ChatService) -> None:
        self._completions = completions
        self._chat = chat

    async def create(self, request: Request) -> Response:
        body = await read_json(request)
        if "messages" in body:
            return await self._chat.serve(request, ChatCompletionRequest.model_validate(body))
        if "prompt" in body:
            return await self._completions.serve(request, CompletionRequest.model_validate(body))
        raise InvalidRequestError("Send messages for a chat, or prompt for a completion")


def _json(value: Any) -> Response:
    return Response(dump_json(value), media_type=JSON_TYPE)
