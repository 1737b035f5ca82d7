"""The state that routes share: engine, options and counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from vmserve.server.admission import Admission, BodyBytes, Visit
from vmserve.server.aside_process import AsideProcesses
from vmserve.server.auth import ApiKey, KeyRing
from vmserve.server.config import ServerConfig
from vmserve.server.engine_client import EngineClient
from vmserve.server.errors import ApiError
from vmserve.server.idle import IdleWork
from vmserve.server.key_limits import KeyLedger
from vmserve.server.lifecycle import Lifecycle
from vmserve.server.telemetry import Telemetry
from vmserve.server.tracing import Tracing
from vmserve.server.workers import Workers

__all__ = ["ServerContext"]

T = TypeVar("T")


class ServerContext:
    """One per application. :meth:`close` joins the threads that tokenize and export spans.

    Raises :class:`~vmserve.errors.ConfigurationError` for spans that cannot be exported.
    """

    def __init__(self, engine: EngineClient, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.lifecycle = Lifecycle()
        self.keys = KeyRing(config.keys, share_prefix_cache=config.share_prefix_cache_across_keys)
        #: Who may use admin routes; None: there are no such routes.
        self.admin_keys = (
            None if config.admin_api_key is None else KeyRing([ApiKey.of("", config.admin_api_key)])
        )
        self.admission = Admission(
            config.max_queued_requests,
            config.max_queued_tokens,
            lambda: int(engine.stats().get("num_requests_running", 0)),
        )
        self.key_limits = KeyLedger(
            config.key_limits, {key.name: key.limits for key in config.named_keys}
        )
        self.telemetry = Telemetry()
        endpoint = config.otlp_traces_endpoint
        self.tracing = None if endpoint is None else Tracing(endpoint)
        self.created = int(time.time())
        self.bodies = BodyBytes()
        self.processes = AsideProcesses(engine.tokenizer.to_json)
        self.workers = Workers()
        self._idle = IdleWork(self.processes)

    @property
    def max_model_len(self) -> int:
        return self.engine.resolved.max_model_len

    # What telemetry reads at each scrape.

    def engine_stats(self) -> dict[str, float | int]:
        return self.engine.stats()

    @property
    def model_name(self) -> str:
        return self.config.model_name

    @property
    def num_rejected(self) -> int:
        return self.admission.num_rejected + self.key_limits.num_rejected

    @property
    def num_failed(self) -> int:
        return self.lifecycle.num_failed

    @property
    def num_active(self) -> int:
        return self.lifecycle.num_active

    @property
    def vllm_metrics(self) -> bool:
        return self.config.vllm_metrics

    def served_name(self, name: str | None) -> str:
        """Return the model name for a reply. Raises :class:`ApiError` 404 for one unknown."""
        if name is not None and name not in self.config.served_model_names:
            raise ApiError(404, f"The model `{name[:200]}` does not exist.", "model")
        return self.config.model_name

    async def run_aside(
        self, request: Request, work: Callable[[], T], size: int | None = None
    ) -> T:
        """Run ``work`` on another thread, in the turn of the request's tenant.

        ``size``: bytes that decide between the short and the long lane; the body's by default.
        Raises what ``work`` raises, and :class:`ApiError` 429.
        """
        visit: Visit = request.state.visit
        size = visit.num_bytes if size is None else size
        try:
            return await self.workers.run(visit.tenant, work, size)
        finally:
            self._idle.note(size)

    def close(self) -> None:
        self.workers.close()
        self._idle.close()
        if self.tracing is not None:
            self.tracing.close()
