"""What the server gives back once many or large requests have passed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from vmserve.server.net.aside_process import AsideProcesses
from vmserve.server.net.workers import Workers
from vmserve.system.heap import MemoryReturn

__all__ = ["IdleWork"]

#: Seconds without the end of a request with a body. Then memory goes back to the system, and
#: processes for large ones end.
_IDLE_SECONDS: Final = 5.0


class IdleWork:
    """Waits for requests to be over. Belongs to one event loop."""

    def __init__(
        self, processes: AsideProcesses, workers: Workers, forget: Callable[[], None]
    ) -> None:
        """``forget`` empties caches; it is called on another thread."""
        self._processes = processes
        self._workers = workers
        self._forget = forget
        self._due: asyncio.TimerHandle | None = None
        self._last = 0.0
        self._memory = MemoryReturn()

    def note(self) -> None:
        """A request has just ended."""
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        if self._due is None:
            self._due = loop.call_later(_IDLE_SECONDS, self._tidy)

    def _tidy(self) -> None:
        loop = asyncio.get_running_loop()
        if self._workers.is_busy:
            self._last = loop.time()
        due = self._last + _IDLE_SECONDS
        if loop.time() < due:
            self._due = loop.call_at(due, self._tidy)
            loop.run_in_executor(None, self._memory.trim)
            return
        self._due = None
        loop.run_in_executor(None, self._give_back)

    def _give_back(self) -> None:
        self._processes.close_idle()
        self._memory.give_back(self._forget)

    def close(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._processes.close_idle()
