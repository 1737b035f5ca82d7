"""Read attributes of hundreds of sequences of a step in one call of the core."""

from __future__ import annotations

from vmserve import _core

__all__ = ["step_columns", "take_unpublished"]

step_columns = _core.step_columns
take_unpublished = _core.take_unpublished
