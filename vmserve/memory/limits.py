"""System limits of a process, read by the core."""

from __future__ import annotations

from vmserve import _core

__all__ = ["available_memory", "max_map_count"]


def max_map_count() -> int:
    """Most mappings of a process (``vm.max_map_count``)."""
    return _core.SystemLimits().max_map_count()


def available_memory() -> tuple[int, str]:
    """Free bytes, and the scope they are of: the system's, or the control group's."""
    return _core.SystemLimits().available_memory()
