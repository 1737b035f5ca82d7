"""The engine for many callers at once: one thread steps it, callers use asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from vmserve.client.core import ClientCore
from vmserve.client.inbox import Inbox
from vmserve.client.messages import FromEngine, Shutdown
from vmserve.client.transports.thread import ThreadTransport
from vmserve.config import EngineConfig
from vmserve.engine.build import Progress
from vmserve.engine.engine import LLMEngine
from vmserve.errors import EngineDeadError
from vmserve.models.config import ModelConfig
from vmserve.telemetry.snapshot import EngineSnapshot

__all__ = ["AsyncLLM"]


class AsyncLLM(ClientCore):
    """Streams from one engine to any number of tasks on any number of event loops.

    Arguments and errors are those of :class:`vmserve.LLM`. Loading blocks.

        async with AsyncLLM(kv_cache_memory="256MiB") as llm:
            async for output in llm.generate("Once upon a time", stream=True):
                for choice in output.outputs:
                    print(choice.text, end="")
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        progress: Progress | None = None,
        **engine_options: Any,
    ) -> None:
        config = EngineConfig.from_options({"model": model, **engine_options})
        self._engine = engine = LLMEngine(config, progress=progress)
        self.model_config: ModelConfig = engine.model_config
        self.identity = engine.identity
        defaults = engine.model_config.default_sampling
        super().__init__(config, engine.resolved, engine.limits, engine.tokenizer, defaults)
        self._died = False
        self._inbox_of: dict[asyncio.AbstractEventLoop, Inbox] = {}
        self._thread = ThreadTransport(engine)
        self.attach(self._thread)

    @property
    def errored(self) -> bool:
        return self._died

    @property
    def retry_seconds(self) -> None:
        """An engine in this process is not started again."""

    def stats(self) -> dict[str, float | int]:
        """The engine's metrics as of its last step."""
        return self._thread.stats

    @property
    def num_running(self) -> int:
        """Requests that run as of the engine's last step."""
        return int(self._thread.stats.get("num_requests_running", 0))

    async def fetch_stats(self) -> dict[str, float | int]:
        """The engine's metrics as of its last step, which are never old in one process."""
        return self._thread.stats

    async def until_dead(self) -> None:
        """Return when the engine has died by itself."""
        questions, serial = self._inbox.questions, next(self._serials)
        death = questions[serial] = self._thread.future()  # no message answers it
        try:
            if not self._died:  # checked after the future is registered
                with contextlib.suppress(EngineDeadError):
                    await death
        finally:
            del questions[serial]

    async def snapshot(self) -> EngineSnapshot:
        """Take a picture of memory, queues and requests between two steps, for live views.

        Raises :class:`~vmserve.errors.EngineDeadError` if the engine has stopped.
        """
        taken: EngineSnapshot = await self.ask("snapshot")
        return taken

    async def shutdown(self, timeout: float = 0.0) -> None:
        """Let running requests finish for ``timeout`` seconds, abort the rest, stop the thread."""
        deadline = time.monotonic() + timeout
        while any(inbox.requests for inbox in self._inboxes) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self._send_quietly(Shutdown())
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()

    # -- an inbox for each event loop ---------------------------------------------------

    @property
    def _inbox(self) -> Inbox:
        loop = asyncio.get_running_loop()
        if loop not in self._inbox_of:
            for other in list(self._inbox_of):
                if other.is_closed():
                    self._inbox_of.pop(other, None)
            self._inbox_of[loop] = Inbox()
        return self._inbox_of[loop]

    @property
    def _inboxes(self) -> Sequence[Inbox]:
        return list(self._inbox_of.values())

    def _receive(self, message: FromEngine) -> None:
        self._on_loops(lambda inbox: inbox.take(message))

    def _lost(self) -> None:
        self._died = True
        if self.lender is not None:
            self.lender.lost()
        dead = EngineDeadError("the engine has stopped; restart the server")
        self._on_loops(lambda inbox: inbox.fail(dead))

    def _on_loops(self, call: Callable[[Inbox], None]) -> None:
        """Call, from the engine's thread, on each event loop that waits for something."""
        for loop, inbox in list(self._inbox_of.items()):
            if not inbox:
                continue
            try:
                loop.call_soon_threadsafe(call, inbox)
            except RuntimeError:  # the loop is closed: nobody waits
                self._inbox_of.pop(loop, None)
