"""The server's application as a deployment of Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmserve.client.client import Client
from vmserve.client.engines.local import load_engine
from vmserve.config import EngineConfig
from vmserve.errors import ConfigurationError, EngineDeadError
from vmserve.models.hub import EMBEDDED_NAME
from vmserve.server.app import create_app
from vmserve.server.config import ServerConfig
from vmserve.server.models.dialect import check_template

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["ServedEngine", "deployment"]


class ServedEngine:
    """An ASGI application with an engine process, both of which live as long as its lifespan.

    The thread of its event loop starts the engine, because the engine ends with the thread that
    started it. The engine is restarted as by ``vmserve serve``.
    """

    def __init__(
        self, model: str | None, config: ServerConfig, engine_options: Mapping[str, Any]
    ) -> None:
        self._model = model
        self._config = config
        self._engine_options = engine_options
        self._engine: Client | None = None
        self._app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        else:
            assert self._app is not None
            await self._app(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._engine = engine = Client(await load_engine(self._model, **self._engine_options))

        async def tell(message: Message) -> None:
            # The caller that learns that all has ended ends this process, or its event loop.
            if message["type"].startswith("lifespan.shutdown."):
                await engine.shutdown()
            await send(message)

        try:
            check_template(engine.tokenizer, self._config.chat_template)
            self._app = create_app(engine, self._config)
            await self._app(scope, receive, tell)
        finally:
            await engine.shutdown()

    def check_health(self) -> None:
        """Raises :class:`~vmserve.errors.EngineDeadError` while no engine serves requests."""
        if self._engine is None or self._engine.errored:
            raise EngineDeadError("no engine serves requests")


def deployment(
    model: str | None = None,
    *,
    server: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    **engine_options: Any,
) -> Any:
    """Make a Ray Serve application that serves a model with vmserve's HTTP API.

        serve.run(deployment("smollm2", options={"num_replicas": 2}))

    ``options``: those of ``serve.deployment`` (``num_replicas``, ``autoscaling_config``,
    ``ray_actor_options``, ...). ``server``: those of the HTTP server, by the names of
    :class:`~vmserve.server.config.ServerConfig` (``api_keys``, ...). ``engine_options``: as
    :class:`vmserve.LLM` takes them. Each replica has a server and an engine process. Ray Serve
    chooses the replica of a request, and knows no prefixes.

    Raises :class:`~vmserve.errors.ConfigurationError` for bad options and without Ray Serve.
    """
    try:
        from ray import serve  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigurationError(
            f"Ray Serve cannot be imported ({error}): pip install 'vmserve[ray]'"
        ) from error

    name = EMBEDDED_NAME if model is None else Path(model).name
    # Ray Serve listens, so what names the server may be called by is not for us to restrict.
    config = ServerConfig(**{"host": "0.0.0.0", "served_model_names": (name,), **(server or {})})
    EngineConfig.from_options({"model": model, **engine_options})

    def build() -> ServedEngine:
        return ServedEngine(model, config, engine_options)

    class VmServe:
        def check_health(self) -> None:
            self.app.check_health()  # type: ignore[attr-defined]  # Ray Serve adds it

    made = serve.deployment(serve.ingress(build)(VmServe), name="vmserve", **(options or {}))
    return made.bind()
