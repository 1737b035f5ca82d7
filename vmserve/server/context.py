"""What the routes share: the engine, the options, and the counts of what is going on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from vmserve.server.admission import Admission
from vmserve.server.auth import KeyRing
from vmserve.server.config import ServerConfig
from vmserve.server.engine_client import EngineClient
from vmserve.server.errors import ApiError
from vmserve.server.key_limits import KeyLedger
from vmserve.server.lifecycle import Lifecycle
from vmserve.server.telemetry import Telemetry
from vmserve.server.tracing import Tracing

__all__ = ["LONG_WORK", "ServerContext"]

T = TypeVar("T")
#: A text of so many characters takes some 10 ms to encode; longer ones have a thread of their own.
LONG_WORK: Final = 32 * 1024


class ServerContext:
    """One per application. :meth:`close` joins the threads that tokenize and export spans.

    Raises :class:`~vmserve.errors.ConfigurationError` for spans that cannot be exported.
    """

    def __init__(self, engine: EngineClient, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.lifecycle = Lifecycle()
        self.keys = KeyRing(config.keys, share_prefix_cache=config.share_prefix_cache_across_keys)
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
        # Megabytes of text must stop neither the event loop nor others' short ones.
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="vmserve-aside")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="vmserve-aside-long")

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
        """The name that a reply leads with. Raises :class:`ApiError` 404 for one unknown."""
        if name is not None and name not in self.config.served_model_names:
            raise ApiError(404, f"The model `{name[:200]}` does not exist.", "model")
        return self.config.model_name

    async def run_aside(self, work: Callable[[], T], size: int) -> T:
        """Run ``work`` on ``size`` characters, bytes or tokens (a text to encode, a large body) on
        another thread. What is long waits for what is long, and for nothing else."""
        lane = self._long if size > LONG_WORK else self._aside
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def close(self) -> None:
        for lane in (self._aside, self._long):
            lane.shutdown(wait=True, cancel_futures=True)
        if self.tracing is not None:
            self.tracing.close()
