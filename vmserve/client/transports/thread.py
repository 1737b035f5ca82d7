"""A transport to a thread of this process, which owns the engine."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

from vmserve.client.messages import ToEngine
from vmserve.client.service import EngineService
from vmserve.client.transports.base import Lost, Receive
from vmserve.engine.engine import LLMEngine

__all__ = ["ThreadTransport"]

logger = logging.getLogger(__name__)


class ThreadTransport:
    """Calls ``receive`` and ``lost`` in the engine's thread. Futures belong to the running loop.

    ``stats``: the engine's metrics as of its last step.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="vmserve-engine", daemon=True)

    def on(self, receive: Receive, lost: Lost) -> None:
        self._service = EngineService(self._engine, receive, self._read_stats)
        self._lost = lost
        self._thread.start()

    def send(self, message: ToEngine) -> None:
        self._service.post(message)

    def future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    async def turn(self) -> None:
        await asyncio.sleep(0)

    def join(self) -> None:
        """Wait until the thread ends, which it does after a :class:`Shutdown`."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._service.run()
        except BaseException:  # the thread's boundary: nothing above it handles exceptions
            logger.exception("the engine stopped")
            self._lost()
        finally:
            self._engine.close()

    def _read_stats(self) -> None:
        self.stats = self._engine.stats()
