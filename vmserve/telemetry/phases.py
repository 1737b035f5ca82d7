"""Measure the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["PHASES", "PhaseSpan", "StepPhases"]

#: Phases of a step in their order.
PHASES = ("schedule", "memory", "model", "sample", "output")


class PhaseSpan(NamedTuple):
    """Seconds of the engine's clock."""

    phase: str
    began: float
    ended: float


class StepPhases:
    """The phases of one step. Each phase ends where the next one begins or resumes."""

    __slots__ = ("_clock", "_last", "spans")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.spans: list[PhaseSpan] = []
        self._clock = clock
        self._last = clock()

    def resume(self) -> None:
        """Begin the next phase now: the time since the last one belongs to another step."""
        self._last = self._clock()

    def end(self, phase: str) -> float:
        """End the phase; return its seconds."""
        now = self._clock()
        span = PhaseSpan(phase, self._last, now)
        self.spans.append(span)
        self._last = now
        return now - span.began
