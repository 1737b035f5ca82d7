"""How many threads compute."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

__all__ = ["num_threads"]

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def num_threads() -> int:
    """Return torch's number of threads if torch is imported, for the user may have set it.

    Otherwise ``OMP_NUM_THREADS``, or the number of cores that this process may use.
    """
    torch = sys.modules.get("torch")
    # While another thread imports it, it has no such function yet.
    chosen: Callable[[], int] | None = getattr(torch, "get_num_threads", None)
    return _default() if chosen is None else chosen()


@cache
def _default() -> int:
    # A list is one number for each level of nesting.
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if first.isdecimal() and int(first) > 0:
        return int(first)
    return len({_core_of(cpu) for cpu in os.sched_getaffinity(0)})


def _core_of(cpu: int) -> str:
    """The same for hardware threads of one core, which share its arithmetic units."""
    try:
        return Path(_SIBLINGS.format(cpu)).read_text()
    except OSError:  # not told here
        return str(cpu)
