"""Swap victims out while running sequences continue."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vmserve.scheduler.base import StepInProgress

if TYPE_CHECKING:
    from vmserve.memory.base import KVMemory
    from vmserve.scheduler.forecast import BlockForecast
    from vmserve.scheduler.preemption import PreemptionPolicy

__all__ = ["CopiesOut"]


class CopiesOut:
    """Swaps out in the background: only sequences that need a victim's pages wait for its copy.

    One step is planned without them. After that the copies are waited for, so that no sequence
    is left out for longer.
    """

    def __init__(self, memory: KVMemory, forecast: BlockForecast, policy: PreemptionPolicy) -> None:
        self._memory = memory
        self._forecast = forecast
        self._policy = policy
        self._num_bytes = 0
        self._began = 0.0
        self._left_out = False

    def swap_out(self, memory_ids: list[int], num_bytes: int) -> bool:
        """Swap the sequences out; returns whether their pages are free, now or after the copies."""
        if not self._memory.is_copying:
            self._num_bytes = 0
            self._began = time.perf_counter()
            self._left_out = False
        if not self._memory.swap_out(memory_ids):
            return False
        self._num_bytes += num_bytes
        if not self._memory.is_copying:
            self._policy.copied(self._num_bytes, time.perf_counter() - self._began)
        return True

    def leave_out(self, draft: StepInProgress) -> StepInProgress:
        """The draft without sequences that need more memory and without beams, which go together.

        Empty if there was such a step since the copies began.
        """
        kept = StepInProgress()
        if self._left_out:
            return kept
        self._left_out = True
        for sequence, num_new in draft:
            has = self._forecast.blocks(sequence, sequence.num_computed)
            wants = self._forecast.blocks(sequence, sequence.num_computed + num_new)
            if has == wants and sequence.start is None and not sequence.request.is_gang:
                kept.append((sequence, num_new))
        return kept

    def finish(self) -> None:
        """Wait for the copies, and measure them unless they had ended before."""
        if self._memory.finish_copies():
            self._policy.copied(self._num_bytes, time.perf_counter() - self._began)
