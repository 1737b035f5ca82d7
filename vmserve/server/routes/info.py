"""Routes that describe the server: models, health, version, load, memory, metrics."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from vmserve.errors import InvalidRequestError
from vmserve.server.access.scope import gather
from vmserve.server.context import ServerContext
from vmserve.server.errors import ApiError
from vmserve.server.models.rows import (
    engine_figures,
    engine_rows,
    model_card,
    model_families,
)
from vmserve.server.models.served import ServedModel
from vmserve.server.observe.telemetry import ModelFigures, render_metrics
from vmserve.server.routes.body import read_json
from vmserve.server.routes.chat import ChatService
from vmserve.server.routes.completions import CompletionService
from vmserve.server.wire import JSON_TYPE, dump_json
from vmserve.server.words.protocol import ChatCompletionRequest, CompletionRequest
from vmserve.version import __version__

__all__ = ["InfoService", "InvocationService"]


#: Bytes of a line of ``/metrics``.
_FIGURE_BYTES: Final = 90


class InfoService:
    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def health(self, request: Request) -> Response:
        """200 while an engine runs; 503 from its death or a shutdown on.

        There is a body where models have several engines: the state of each.
        """
        if self._context.models.errored:
            raise ApiError(503, "The engine has stopped and cannot serve requests.")
        engines = {
            served.name: {row["id"]: row["state"] for row in rows}
            for served in self._context.models
            if (rows := engine_rows(served))
        }
        return _json({"engines": engines}) if engines else Response()

    async def live(self, request: Request) -> Response:
        """200 as long as the process answers, whatever its engines do, also while it drains."""
        return Response()

    async def version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def load(self, request: Request) -> Response:
        """The generation requests now being served, streams until their last byte."""
        return _json({"server_load": self._context.lifecycle.num_active})

    async def models(self, request: Request) -> Response:
        cards = [
            model_card(name, served, tells_state=self._context.models.have_states)
            for served in self._context.models
            for name in served.config.served_model_names
        ]
        return _json({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        models = self._context.models
        return _json(model_card(name, models.find(name), tells_state=models.have_states))

    async def kv(self, request: Request) -> Response:
        """The engine's figures: queues, pages, slots and what memory they take."""
        served = self._context.models.find(request.query_params.get("model"))
        return _json(await served.fetch_stats())

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        context = self._context
        await gather([served.refresh() for served in context.models])
        figures = [self._figures(served) for served in context.models]
        render = partial(
            render_metrics,
            figures,
            list(model_families(context.models)) if context.models.have_states else [],
            vllm_metrics=context.config.vllm_metrics,
            accept=request.headers.get("accept", ""),
        )
        # With turns of its own: it does not wait for all that a tenant has sent.
        num_figures = sum(len(stats) for each in figures for stats in each.engines.values())
        body, media_type = await context.workers.run(
            "/metrics", render, num_figures * _FIGURE_BYTES
        )
        return Response(body, media_type=media_type)

    def _figures(self, served: ServedModel) -> ModelFigures:
        # Where there is one model, its requests are all requests, also before they name it.
        models, life = self._context.models, served.lifecycle
        life = self._context.lifecycle if len(models) == 1 else life
        engines = engine_figures(served)
        labels = ModelFigures.labels(served.name, are_several=bool(engines))
        return ModelFigures(
            model_name=served.name,
            max_model_len=served.max_model_len if served.is_loaded else None,
            kv_cache_dtype=served.kv_cache_dtype if served.is_loaded else None,
            observed=list(served.telemetry.families(*labels)),
            stats=served.own_stats(),
            num_rejected=served.num_rejected,
            num_failed=life.num_failed,
            num_active=life.num_active,
            engines=engines,
        )


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
