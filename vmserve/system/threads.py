"""How many threads compute."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection
from functools import cache
from itertools import pairwise
from pathlib import Path

from vmserve.errors import ConfigurationError

__all__ = ["keep_to", "num_threads", "split_cpus"]

_NODES = "/sys/devices/system/cpu/cpu{}"
_CPU_MAX = "/sys/fs/cgroup/cpu.max"
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
    return _asked_for() or len({_core_of(cpu) for cpu in os.sched_getaffinity(0)})


def _asked_for() -> int:
    """``OMP_NUM_THREADS``; 0 if it says nothing."""
    # A list is one number for each level of nesting.
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def keep_to(cpus: Collection[int]) -> Callable[[], None]:
    """Compute on these CPUs from now on, with no more threads than they have cores.

    Threads that this one has started before keep to their own. Returns what undoes it.
    """
    before, asked = os.sched_getaffinity(0), os.environ.get("OMP_NUM_THREADS")
    torch = sys.modules.get("torch")
    set_threads: Callable[[int], None] = getattr(torch, "set_num_threads", lambda _: None)
    threads = num_threads()
    os.sched_setaffinity(0, cpus)
    cores = len({_core_of(cpu) for cpu in cpus})
    os.environ["OMP_NUM_THREADS"] = str(min(_asked_for() or cores, cores))
    set_threads(min(threads, cores))
    _default.cache_clear()

    def undo() -> None:
        os.sched_setaffinity(0, before)
        if asked is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = asked
        set_threads(threads)
        _default.cache_clear()

    return undo


def split_cpus(parts: int, asked: str = "data_parallel_size: {} engines") -> list[tuple[int, ...]]:
    """Split the CPUs that this process may use, in whole cores that are near each other.

    Raises :class:`~vmserve.errors.ConfigurationError` for fewer cores than parts; ``asked`` says
    who wants them.
    """
    cores: dict[tuple[int, str], list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        cores.setdefault((_node_of(cpu), _core_of(cpu)), []).append(cpu)
    near = [cores[each] for each in sorted(cores, key=lambda each: (each[0], cores[each]))]
    usable = min(len(near), _quota())
    if parts > usable:
        raise ConfigurationError(
            f"{asked.format(parts)} need {parts} cores, and this process may use {usable}"
        )
    # Only as many cores are of use as a quota of time pays for.
    bounds = [usable * part // parts for part in range(parts + 1)]
    return [tuple(cpu for core in near[low:high] for cpu in core) for low, high in pairwise(bounds)]


def _node_of(cpu: int) -> int:
    """The number of its NUMA node; 0 where the system does not say."""
    nodes = Path(_NODES.format(cpu)).glob("node[0-9]*")
    return next((int(node.name.removeprefix("node")) for node in nodes), 0)


def _quota() -> int:
    """Cores' worth of time that the control group has, at least 1."""
    try:
        quota, period = Path(_CPU_MAX).read_text().split()
        return max(1, -(-int(quota) // int(period)))
    except (OSError, ValueError):  # there is none, or it is "max"
        return sys.maxsize


def _core_of(cpu: int) -> str:
    """The same for hardware threads of one core, which share its arithmetic units."""
    try:
        return Path(_SIBLINGS.format(cpu)).read_text()
    except OSError:  # unknown here
        return str(cpu)
