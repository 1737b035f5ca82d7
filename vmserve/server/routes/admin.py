"""Routes that change how the server runs. They are there with ``--admin-api-key`` alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from vmserve.client.transports.fleet import Fleet
from vmserve.errors import ConfigurationError, EngineDeadError, InvalidRequestError
from vmserve.server.context import ServerContext
from vmserve.server.errors import ApiError
from vmserve.server.models.rows import engine_rows, model_row
from vmserve.server.models.served import ServedModel
from vmserve.server.routes.body import read_model
from vmserve.server.wire import JSON_TYPE, dump_json
from vmserve.server.words.protocol import (
    AddModelRequest,
    KVMemoryRequest,
    ModelRequest,
    ModelTermsRequest,
)

__all__ = ["ADMIN_PATHS", "ENGINE_PATHS", "MODEL_PATHS", "AdminService"]

#: Paths for memory and caches; the last two are the names that vLLM and SGLang have for one thing.
ADMIN_PATHS: Final = frozenset({"/v1/kv/memory", "/reset_prefix_cache", "/flush_cache"})
#: Paths that take POST: with other methods they are names of models.
MODEL_PATHS: Final = frozenset(
    f"/v1/models/{change}" for change in ("add", "remove", "change", "sleep", "wake")
)
#: Prefix of all routes that are about one of several engines.
ENGINE_PATHS: Final = "/v1/engines/"
#: Fields of :class:`AddModelRequest` that tables of ``--models-config`` have too.
_TABLE: Final = ("weight", "kv_floor", "kv_cap", "preload")


class AdminService:
    def __init__(self, context: ServerContext) -> None:
        self._models = context.models
        self._drain_seconds = context.config.shutdown_timeout

    async def set_kv_memory(self, request: Request) -> Response:
        """``{kv_cache_memory, model}``: how far the KV cache may grow now, in bytes of whole pages.

        Of several models without ``model``, that of all together.
        """
        body = await read_model(request, KVMemoryRequest)
        served, size = self._models.find(body.model), body.kv_cache_memory
        try:
            if served.memory is None:
                limit = await served.engine.set_kv_cache_memory(size)
            elif body.model is None:
                for each in self._models:
                    if each.memory is not None:
                        each.memory.check_pool(size)
                served.memory.pool.resize(size)
                limit = served.memory.pool.size_bytes
            else:
                limit = served.memory.change(cap=size)
        except ConfigurationError as error:
            raise InvalidRequestError(str(error), "kv_cache_memory") from error
        return _reply({"kv_cache_memory": limit})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """200 without a body once every cached prefix is forgotten and pinned ones are back."""
        for served in self._models:
            if served.is_awake:
                await served.engine.reset_prefix_cache()
        return Response()

    async def add_model(self, request: Request) -> Response:
        """Add a model, and load it unless ``preload`` is false; returns how it stands."""
        body = await read_model(request, AddModelRequest)
        given = {name: getattr(body, name) for name in _TABLE}
        table = {**(body.options or {}), "model": body.model}
        table |= {name: value for name, value in given.items() if value is not None}
        try:
            return _row(await self._models.add(body.name or body.model, table))
        except ConfigurationError as error:
            raise InvalidRequestError(str(error)) from error
        except EngineDeadError as error:
            raise ApiError(503, str(error)) from error

    async def remove_model(self, request: Request) -> Response:
        """Answer 404 for it from now on; end it when its requests have, or after ``timeout``."""
        body = await read_model(request, ModelRequest)
        return _row(await self._models.remove(body.model, self._timeout(body)))

    async def change_model(self, request: Request) -> Response:
        """``{weight, kv_floor, kv_cap}``: its terms in the pool, from now on."""
        body = await read_model(request, ModelTermsRequest)
        served = self._models.find(body.model)
        given = {"weight": body.weight, "floor": body.kv_floor, "cap": body.kv_cap}
        if served.memory is None:
            raise InvalidRequestError("This server has one model, whose memory nobody shares")
        try:
            served.memory.change(**{name: each for name, each in given.items() if each is not None})
        except ConfigurationError as error:
            raise InvalidRequestError(str(error)) from error
        return _row(served)

    async def sleep_model(self, request: Request) -> Response:
        """End its engine, after ``timeout`` seconds for what runs. Its next request wakes it."""
        body = await read_model(request, ModelRequest)
        served = self._models.find(body.model)
        if not served.can_sleep:
            raise InvalidRequestError("An engine in the server's own process cannot be ended")
        await served.sleep(self._timeout(body))
        return _row(served)

    async def wake_model(self, request: Request) -> Response:
        """Start its engine now, also if it has failed before."""
        body = await read_model(request, ModelRequest)
        served = self._models.find(body.model)
        served.forgive()
        await served.awake()
        return _row(served)

    async def drain_engine(self, request: Request) -> Response:
        """Send an engine no more requests; those that it has go on."""
        fleet, engine = self._engine(request)
        return self._engines(request, lambda: fleet.drain(engine))

    async def resume_engine(self, request: Request) -> Response:
        """Send an engine requests again."""
        fleet, engine = self._engine(request)
        return self._engines(request, lambda: fleet.resume(engine))

    async def remove_engine(self, request: Request) -> Response:
        """End an engine when its requests have, or after the time that a shutdown gives them."""
        fleet, engine = self._engine(request)
        _refusing(lambda: fleet.drain(engine))
        await fleet.leave(engine, self._drain_seconds)
        return self._engines(request, lambda: None)

    def _engine(self, request: Request) -> tuple[Fleet, str]:
        """The engines that the request is about, of the model in its query, and the one's id."""
        served = self._models.find(request.query_params.get("model"))
        fleet, engine = served.fleet, request.path_params["engine"]
        if fleet is None or engine not in {member.name for member in fleet.members}:
            raise ApiError(404, f"The model {served.name} has no engine {engine[:200]!r}.")
        return fleet, engine

    def _engines(self, request: Request, change: Callable[[], object]) -> Response:
        _refusing(change)
        served = self._models.find(request.query_params.get("model"))
        return _reply({"engines": engine_rows(served)})

    def _timeout(self, body: ModelRequest) -> float:
        return self._drain_seconds if body.timeout is None else body.timeout


def _refusing(change: Callable[[], object]) -> None:
    """Make a change; what it cannot be made for is the caller's error."""
    try:
        change()
    except ConfigurationError as error:
        raise InvalidRequestError(str(error), "engine") from error


def _row(served: ServedModel) -> Response:
    return _reply(model_row(served))


def _reply(value: dict[str, Any]) -> Response:
    return Response(dump_json(value), media_type=JSON_TYPE)
