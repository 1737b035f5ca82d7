"""When an engine is started again, and how long it may be silent before."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from vmserve.errors import VmserveError

__all__ = ["RESTART_WINDOW_SECONDS", "Reconnecting", "RestartBudget"]

logger = logging.getLogger(__name__)

#: Age up to which restarts count: an engine that dies once a week is not in a loop.
RESTART_WINDOW_SECONDS = 3600.0
#: The first and the longest pause before a restart, in seconds. It doubles with each restart in the
#: window.
_RESTART_SECONDS, _LONGEST_RESTART_SECONDS = 0.5, 30.0
#: The same for connections, which cost nothing.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 5.0


class RestartBudget:
    """Limits restarts of an engine to ``most`` in each window. ``clock``: seconds."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._recent: deque[float] = deque()

    @property
    def left(self) -> int:
        """Number of restarts that are possible now."""
        while self._recent and self._recent[0] <= self._clock() - RESTART_WINDOW_SECONDS:
            self._recent.popleft()
        return self._most - len(self._recent)

    def take(self) -> float | None:
        """Count a restart; returns the pause before it in seconds, or None if none is left."""
        if self.left <= 0:
            return None
        doublings = min(len(self._recent), 16)  # a float could not hold the power of more
        pause = min(_RESTART_SECONDS * 2.0**doublings, _LONGEST_RESTART_SECONDS)
        self._recent.append(self._clock())
        return pause


class Reconnecting:
    """Attempts to connect, without an end: pauses grow, and a failure is logged if it is news."""

    def __init__(self) -> None:
        self._pause = _FIRST_PAUSE_SECONDS
        self._logged = ""

    def pause(self) -> float:
        """Seconds before the next attempt."""
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        return pause

    def failed(self, error: VmserveError) -> None:
        if str(error) != self._logged:
            self._logged = str(error)
            logger.warning("not connected yet: %s", error)
