"""Memory that a process has and does not use, and its way back to the system."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["MemoryReturn", "trim_memory"]

_MUCH = 16 << 20
_TRIM_SECONDS = 60.0


class MemoryReturn:
    """Gives memory back to the system when much was taken or freed since the last time.

    What was freed in pieces all over the heap would stay with the allocator.
    """

    def __init__(self) -> None:
        self._before = _own_bytes()
        self._trimmed = time.monotonic()

    def trim(self) -> None:
        """Give back what is free in the heap, at most once a minute. Call it during work.

        It takes milliseconds. A heap that is never idle would else grow by what lies between two
        things that stay.
        """
        if time.monotonic() - self._trimmed >= _TRIM_SECONDS:
            trim_memory()
            self._trimmed = time.monotonic()

    def give_back(self, forget: Callable[[], None] = lambda: None) -> None:
        """Call it when there is nothing to do: it may take tens of milliseconds.

        ``forget`` empties caches of small objects, which were made among those that are gone and
        keep their memory.
        """
        # Less than before counts too: then it was called while there was something to do.
        if abs(_own_bytes() - self._before) < _MUCH:
            return
        forget()
        gc.collect()
        trim_memory()
        self._before = _own_bytes()


def _own_bytes() -> int:
    """What this process has in memory that no other has; 0 where the system does not say."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def trim_memory() -> None:
    """Give free heap memory back to the system; nothing where the C library cannot."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
