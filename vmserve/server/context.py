"""The state that routes share: models, options and counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from vmserve.errors import DeadlineError
from vmserve.server.access.admission import BodyBytes, Visit
from vmserve.server.access.key_limits import KeyLedger
from vmserve.server.auth import ApiKey, KeyRing
from vmserve.server.config import ServerConfig
from vmserve.server.lifecycle import Lifecycle
from vmserve.server.models.registry import Models
from vmserve.server.models.served import ServedModel
from vmserve.server.net.aside_process import AsideProcesses
from vmserve.server.net.idle import IdleWork
from vmserve.server.net.workers import Workers
from vmserve.server.observe.tracing import Tracing
from vmserve.server.words.protocol import (
    CountMessageTokensRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    ResponsesRequest,
    TokenizeRequest,
)

__all__ = ["NamesModel", "ServerContext"]

T = TypeVar("T")
#: Requests that may name their model.
NamesModel = (
    GenerationRequest
    | ResponsesRequest
    | CountMessageTokensRequest
    | EmbeddingRequest
    | TokenizeRequest
    | DetokenizeRequest
)


class ServerContext:
    """One per application. :meth:`close` joins the threads that tokenize and export spans.

    Raises :class:`~vmserve.errors.ConfigurationError` for spans that cannot be exported.
    """

    def __init__(self, models: Models, config: ServerConfig, keys: KeyRing) -> None:
        self.models = models
        self.config = config
        self.lifecycle = Lifecycle()
        self.keys = keys
        #: Keys of admin routes; None: there are no such routes.
        self.admin_keys = (
            None if config.admin_api_key is None else KeyRing([ApiKey.of("", config.admin_api_key)])
        )
        self.key_limits = KeyLedger(
            config.key_limits, {key.name: key.limits for key in config.named_keys}
        )
        endpoint = config.otlp_traces_endpoint
        self.tracing = None if endpoint is None else Tracing(endpoint)
        self.bodies = BodyBytes()
        self.processes = AsideProcesses()
        self.workers = Workers(lambda: sum(each.admission.most_held for each in models))
        self.idle = IdleWork(self.processes, self.workers, self._forget)

    async def model_of(self, request: Request, asked: NamesModel) -> ServedModel:
        """Return the model that ``asked`` names, which counts as used until the request ends.

        A model that was never loaded is loaded first, in the request's time. Raises
        :class:`~vmserve.server.errors.ApiError` 404 for an unknown name and 503 for a model that
        does not start, and :class:`~vmserve.errors.DeadlineError`.
        """
        served = self.models.find(asked.model)
        request.state.model = served
        request.state.exit_stack.enter_context(served.serving())
        if not served.is_loaded:
            began = time.monotonic()
            seconds = getattr(asked, "request_timeout", None)
            try:
                async with asyncio.timeout(seconds):
                    await served.awake()
            except TimeoutError:
                raise DeadlineError(
                    f"the request waited its {seconds:g} seconds for its model to load: allow "
                    "more time"
                ) from None
            request.state.waited = time.monotonic() - began
        return served

    async def run_aside(
        self, request: Request, work: Callable[[], T], size: int | None = None
    ) -> T:
        """Run ``work`` on another thread, in the turn of the request's tenant.

        ``size``: bytes that decide between the short and the long lane; the body's by default.
        Raises what ``work`` raises, and :class:`ApiError` 429.
        """
        visit: Visit = request.state.visit
        size = visit.num_bytes if size is None else size
        return await self.workers.run(visit.tenant, work, size)

    def _forget(self) -> None:
        for served in self.models:
            if served.is_loaded:
                served.engine.tokenizer.forget()

    def close(self) -> None:
        self.workers.close()
        self.idle.close()
        if self.tracing is not None:
            self.tracing.close()
