"""Victims on their way to host memory, while those that run go on beside their copies."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vmserve.scheduler.base import StepDraft

if TYPE_CHECKING:
    from vmserve.memory.base import KVMemory
    from vmserve.scheduler.demand import BlockDemand
    from vmserve.scheduler.preemption import PreemptionPolicy

__all__ = ["CopiesOut"]


class CopiesOut:
    """Who needs the pages of a victim waits for its copies, but not those who need none.

    One step is planned without the former; after that the copies are waited for, so that nobody
    is left out for longer.
    """

    def __init__(self, memory: KVMemory, demand: BlockDemand, policy: PreemptionPolicy) -> None:
        self._memory = memory
        self._demand = demand
        self._policy = policy
        self._num_bytes = 0
        self._began = 0.0
        self._left_out = False

    def swap_out(self, memory_ids: list[int], num_bytes: int) -> bool:
        """Whether the sequences' pages are given up, now or when their copies have ended."""
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

    def leave_out(self, draft: StepDraft) -> StepDraft:
        """The draft without those who need more memory, and without beams, which go together;
        empty if there was such a step since the copies began."""
        kept = StepDraft()
        if self._left_out:
            return kept
        self._left_out = True
        for sequence, num_new in draft:
            has = self._demand.blocks(sequence, sequence.num_computed)
            wants = self._demand.blocks(sequence, sequence.num_computed + num_new)
            if has == wants and sequence.start is None and not sequence.request.is_gang:
                kept.append((sequence, num_new))
        return kept

    def finish(self) -> None:
        """Wait for the copies; how long they took is measured if they had not ended by now."""
        if self._memory.finish_copies():
            self._policy.copied(self._num_bytes, time.perf_counter() - self._began)
