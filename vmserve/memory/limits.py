"""What the system lets a process have, as the core reads it."""

from __future__ import annotations

from vmserve import _core

__all__ = ["available_memory", "max_map_count"]


def max_map_count() -> int:
    """Most mappings of a process (``vm.max_map_count``)."""
    return _core.SystemLimits().max_map_count()


def available_memory() -> tuple[int, str]:
    """Bytes that are free, and whose: the system's, or the control group's."""
    return _core.SystemLimits().available_memory()
