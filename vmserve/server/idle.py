"""What the server gives back once large requests have passed."""

from __future__ import annotations

import asyncio
from typing import Final

from vmserve.host_arrays import trim_memory
from vmserve.server.aside_process import AsideProcesses
from vmserve.server.workers import LONG_WORK

__all__ = ["IdleWork"]

#: Seconds without large work before its memory goes back to the system, and its processes end.
_IDLE_SECONDS: Final = 5.0


class IdleWork:
    """Waits for large work to be over. Belongs to one event loop."""

    def __init__(self, processes: AsideProcesses) -> None:
        self._processes = processes
        self._due: asyncio.TimerHandle | None = None
        self.num_trims = 0

    def note(self, size: int) -> None:
        """Work of ``size`` bytes has just ended."""
        if size <= LONG_WORK:
            return
        if self._due is not None:
            self._due.cancel()
        self._due = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._tidy)

    def _tidy(self) -> None:
        self._due = None
        asyncio.get_running_loop().run_in_executor(None, self._give_back)

    def _give_back(self) -> None:
        self._processes.close_idle()
        # Freed in pieces all over the heap, it would stay with the allocator.
        trim_memory()
        self.num_trims += 1

    def close(self) -> None:
        if self._due is not None:
            self._due.cancel()
        self._processes.close_idle()
