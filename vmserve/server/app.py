"""The application: routes and middleware."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request
from starlette.responses import Response

from vmserve.client.client import Client
from vmserve.server.access.origins import Cors, OriginPolicy
from vmserve.server.access.scope import route_path
from vmserve.server.auth import KeyRing
from vmserve.server.config import ServerConfig
from vmserve.server.context import ServerContext
from vmserve.server.errors import error_response
from vmserve.server.models.registry import Models
from vmserve.server.models.served import ServedModel
from vmserve.server.observe.tracing import Traced
from vmserve.server.routes.admin import AdminService
from vmserve.server.routes.anthropic import MessagesService
from vmserve.server.routes.chat import ChatService
from vmserve.server.routes.completions import CompletionService
from vmserve.server.routes.embeddings import EmbeddingService
from vmserve.server.routes.info import InfoService, InvocationService
from vmserve.server.routes.live import LiveView, Pages
from vmserve.server.routes.middleware import GENERATION_PATHS, Boundary, Gate, RequestScope
from vmserve.server.routes.openapi import body_of, install_openapi
from vmserve.server.routes.responses import ResponsesService
from vmserve.server.routes.tokenization import TokenizationService
from vmserve.server.words.protocol import (
    AddModelRequest,
    ChatCompletionRequest,
    CompletionRequest,
    CountMessageTokensRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    KVMemoryRequest,
    MessagesRequest,
    ModelRequest,
    ModelTermsRequest,
    RequestModel,
    ResponsesRequest,
    TokenizeRequest,
)
from vmserve.version import __version__

__all__ = ["create_app"]

Handler = Callable[[Request], Awaitable[Response]]


def create_app(
    engine: Client | Models, config: ServerConfig, keys: KeyRing | None = None
) -> FastAPI:
    """Make the application for one engine or several models, which it neither starts nor stops.

    ``app.state.context`` is its :class:`ServerContext`. ``keys``: those of ``config``.
    """
    models = engine if isinstance(engine, Models) else Models([ServedModel(config, engine)])
    context = ServerContext(models, config, keys or config.key_ring())

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        context.close()

    app = FastAPI(
        title="vmserve",
        version=__version__,
        docs_url=None,  # FastAPI's loads its scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.context = context
    _add_routes(app, context)
    install_openapi(app, bool(config.keys), models)
    app.add_exception_handler(StarletteHTTPException, _routing_error)
    origins = OriginPolicy(config)
    # The last one added is the outermost.
    app.add_middleware(RequestScope, lifecycle=context.lifecycle)
    if context.tracing is not None:
        app.add_middleware(Traced, tracing=context.tracing, paths=GENERATION_PATHS)
    app.add_middleware(
        Gate,
        keys=context.keys,
        admin_keys=context.admin_keys,
        lifecycle=context.lifecycle,
        origins=origins,
        bodies=context.bodies,
        idle=context.idle,
        open_status_routes=config.open_status_routes,
    )
    app.add_middleware(Boundary, root_path=config.root_path, lifecycle=context.lifecycle)
    app.add_middleware(Cors, policy=origins)
    return app


def _add_routes(app: FastAPI, context: ServerContext) -> None:
    completions, chat = CompletionService(context), ChatService(context)
    embeddings = EmbeddingService(context)
    invocations = InvocationService(completions, chat)
    tokenization, info = TokenizationService(context), InfoService(context)
    view = LiveView(context)

    def get(path: str, handler: Handler, *, in_schema: bool = True) -> None:
        app.add_api_route(path, handler, response_model=None, include_in_schema=in_schema)
        # The same without its body, which the connection leaves out: monitors ask so.
        app.add_api_route(
            path, handler, methods=["HEAD"], response_model=None, include_in_schema=False
        )

    def post(path: str, handler: Handler, *models: type[RequestModel]) -> None:
        extra = body_of(*models) if models else None
        app.add_api_route(path, handler, methods=["POST"], response_model=None, openapi_extra=extra)

    post("/v1/completions", completions.create, CompletionRequest)
    post("/v1/chat/completions", chat.create, ChatCompletionRequest)
    responses = ResponsesService(context, chat)
    post("/v1/responses", responses.create, ResponsesRequest)
    post("/v1/responses/input_tokens", responses.count_tokens, ResponsesRequest)
    messages = MessagesService(chat)
    post("/v1/messages", messages.create, MessagesRequest)
    post("/v1/messages/count_tokens", messages.count_tokens, CountMessageTokensRequest)
    get("/v1/responses/{response_id}", responses.retrieve)
    app.add_api_route(
        "/v1/responses/{response_id}", responses.delete, methods=["DELETE"], response_model=None
    )
    post("/v1/embeddings", embeddings.create, EmbeddingRequest)
    post("/invocations", invocations.create, ChatCompletionRequest, CompletionRequest)
    post("/tokenize", tokenization.tokenize, TokenizeRequest)
    post("/detokenize", tokenization.detokenize, DetokenizeRequest)
    get("/tokenizer_info", tokenization.info)
    get("/v1/models", info.models)
    get("/v1/models/{model:path}", info.model)
    get("/v1/kv", info.kv)
    get("/v1/kv/live", view.data)
    get("/health", info.health)
    get("/live", info.live)
    get("/ready", info.health)
    get("/ping", info.health)
    post("/ping", info.health)
    get("/version", info.version)
    get("/load", info.load)
    get("/metrics", info.metrics)
    if context.admin_keys is not None:
        admin = AdminService(context)
        post("/v1/kv/memory", admin.set_kv_memory, KVMemoryRequest)
        post("/reset_prefix_cache", admin.reset_prefix_cache)
        post("/flush_cache", admin.reset_prefix_cache)
        post("/v1/models/add", admin.add_model, AddModelRequest)
        post("/v1/models/remove", admin.remove_model, ModelRequest)
        post("/v1/models/change", admin.change_model, ModelTermsRequest)
        post("/v1/models/sleep", admin.sleep_model, ModelRequest)
        post("/v1/models/wake", admin.wake_model, ModelRequest)
        post("/v1/engines/{engine}/drain", admin.drain_engine)
        post("/v1/engines/{engine}/resume", admin.resume_engine)
        post("/v1/engines/{engine}/remove", admin.remove_engine)
    for path, handler in Pages(needs_key=bool(context.config.keys)).handlers():
        get(path, handler, in_schema=False)


async def _routing_error(request: Request, error: Exception) -> Response:
    return error_response(error, route_path(request.scope))
