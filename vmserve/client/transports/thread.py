"""A transport to a thread of this process, which owns the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping

from vmserve.client.callers import CallersOfAnyLoop
from vmserve.client.messages import Lost, Shutdown, ToEngine
from vmserve.client.service import EngineService
from vmserve.client.transports.base import Receive
from vmserve.client.transports.here import Here
from vmserve.engine.engine import LLMEngine
from vmserve.errors import EngineDeadError

__all__ = ["ThreadTransport"]

logger = logging.getLogger(__name__)


class ThreadTransport(Here):
    """Calls ``receive`` in the engine's thread, which begins with :meth:`on`."""

    def __init__(self, engine: LLMEngine) -> None:
        super().__init__(engine)
        self.facts.latest = lambda: self._stats
        self.callers = CallersOfAnyLoop()
        self._note()
        self._thread = threading.Thread(target=self._run, name="vmserve-engine", daemon=True)

    def on(self, receive: Receive) -> None:
        self._receive = receive
        self._service = EngineService(self._engine, receive, self._note)
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        self._service.post(message)

    async def close(self) -> None:
        with contextlib.suppress(EngineDeadError):
            self.send(Shutdown())
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self._service.run()
        except BaseException:  # the thread's boundary: nothing above it handles exceptions
            logger.exception("the engine stopped")
            self.facts.is_dead = self.facts.is_ended = True
        finally:
            try:
                self._engine.close()
            finally:
                self._receive(Lost())  # also when it was meant: a pin may not have been computed

    def _note(self) -> None:
        """Note the engine's metrics, after a step."""
        self._stats: Mapping[str, float | int] = self._engine.stats()
        self.facts.num_running = int(self._stats["num_requests_running"])
