"""Routes that change how the server runs. They are there with ``--admin-api-key`` alone."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from vmserve.errors import ConfigurationError, InvalidRequestError
from vmserve.server.body import read_model
from vmserve.server.context import ServerContext
from vmserve.server.protocol import KVMemoryRequest
from vmserve.server.wire import JSON_TYPE, dump_json

__all__ = ["ADMIN_PATHS", "AdminService"]

#: The last two are the names that vLLM and SGLang have for one thing.
ADMIN_PATHS: Final = frozenset({"/v1/kv/memory", "/reset_prefix_cache", "/flush_cache"})


class AdminService:
    def __init__(self, context: ServerContext) -> None:
        self._models = context.models

    async def set_kv_memory(self, request: Request) -> Response:
        """``{kv_cache_memory}``: how far the KV cache may grow now, in bytes of whole pages."""
        body = await read_model(request, KVMemoryRequest)
        try:
            limit = await self._models.default.engine.set_kv_cache_memory(body.kv_cache_memory)
        except ConfigurationError as error:
            raise InvalidRequestError(str(error), "kv_cache_memory") from error
        return Response(dump_json({"kv_cache_memory": limit}), media_type=JSON_TYPE)

    async def reset_prefix_cache(self, request: Request) -> Response:
        """200 without a body once every cached prefix is forgotten and pinned ones are back."""
        for served in self._models:
            if served.is_awake:
                await served.engine.reset_prefix_cache()
        return Response()
