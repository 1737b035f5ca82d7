"""Sequences of a step as the core reads them: attributes of hundreds of them, in one pass."""

from __future__ import annotations

from vmserve import _core

__all__ = ["step_columns", "take_unpublished"]

step_columns = _core.step_columns
take_unpublished = _core.take_unpublished
