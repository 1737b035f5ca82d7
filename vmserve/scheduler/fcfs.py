"""First come, first served, under a token budget, with chunked prefill.

Each step spends ``max_num_batched_tokens``: first one token for every sequence that
decodes (so that a long prompt never stalls those already producing text), then
chunks of the prompts that are being read, in order of arrival, then admissions.

A sequence is admitted only when all of its known tokens fit beside what the running
ones are still promised, so that prompts are never preempted half-read by a newcomer.
When decoding outgrows the pool, the sequence that arrived last gives its pages back
and computes its tokens again later (recomputation; SOSP'23 PagedAttention §4.5).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from vmserve.memory.base import Growth, KVMemory, MemoryPlan, Shortfall
from vmserve.scheduler.base import ScheduledSequence, StepPlan
from vmserve.scheduler.sequence import Request, Sequence, SequenceStatus

__all__ = ["FCFSScheduler", "SchedulerLimits"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    #: Share of the pool that admission leaves free while something runs, as room to decode.
    watermark: float = 0.01


class FCFSScheduler:
    """See the module's text. Not thread-safe: the engine's thread owns it."""

    def __init__(self, memory: KVMemory, limits: SchedulerLimits) -> None:
        self._memory = memory
        self._limits = limits
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        #: The system refused memory that the limit promises: nobody is admitted beside those
        #: that run until one of them has ended, or the same refusal would come each step.
        self._is_short = False
        self.num_preemptions_total = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        self._waiting.extend(request.sequences)

    def finish(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        self._is_short = False
        sequence.status = SequenceStatus.FINISHED

    def abort(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.status is SequenceStatus.RUNNING:
                self.finish(sequence)
            elif sequence.status is SequenceStatus.WAITING:
                self._waiting.remove(sequence)
                sequence.status = SequenceStatus.FINISHED

    def computed(self, plan: StepPlan) -> None:
        for item in plan.scheduled:
            item.sequence.num_computed = item.num_past + item.num_new

    def schedule(self) -> StepPlan | None:
        preempted_before = self.num_preemptions_total
        plan, memory_plan = self._schedule_running()
        if self.num_preemptions_total == preempted_before and self._admit(plan):
            memory_plan = self._memory.plan(_growths(plan))
        if not plan:
            return None
        assert isinstance(memory_plan, MemoryPlan), "admission let in more than fits"
        return StepPlan(tuple(plan), memory_plan)

    def make_room(self) -> Sequence | None:
        victim = self._preempt_last()
        self._is_short = victim is not None
        return victim

    def _preempt_last(self) -> Sequence | None:
        if len(self._running) < 2:
            return None
        victim = self._running[-1]
        self._preempt(victim)
        return victim

    def _schedule_running(
        self,
    ) -> tuple[list[ScheduledSequence], MemoryPlan | Shortfall | None]:
        """Decodes, then prompt chunks; preempts from the back until it fits."""
        while self._running:
            plan = self._share_budget()
            fits = self._memory.plan(_growths(plan))
            if not isinstance(fits, Shortfall):
                return plan, fits
            if self._preempt_last() is None:
                # One sequence alone always fits: the engine checks at start that the pool
                # holds the longest sequence, and set_limit keeps it so.
                raise AssertionError(f"one sequence alone does not fit: {fits}")
        return [], None

    def _share_budget(self) -> list[ScheduledSequence]:
        budget = self._limits.max_num_batched_tokens
        plan: list[ScheduledSequence] = []
        decoding = [seq for seq in self._running if seq.num_uncomputed == 1]
        reading = [seq for seq in self._running if seq.num_uncomputed > 1]
        for sequence in decoding + reading:
            if budget == 0:
                break
            item = _take(sequence, budget)
            plan.append(item)
            budget -= item.num_new
        return plan

    def _admit(self, plan: list[ScheduledSequence]) -> bool:
        """Add newcomers to ``plan`` while budget, slots and memory last; says whether any came."""
        budget = self._limits.max_num_batched_tokens - sum(item.num_new for item in plan)
        if budget == 0 or not self._waiting or self._is_short:
            return False
        num_before = len(plan)
        pages_for = self._memory.layout.pages_for
        stats = self._memory.stats()
        # What a newcomer may take, once every running sequence has what it is owed.
        room = stats.limit_pages - stats.used_pages
        room -= sum(
            pages_for(seq.num_tokens + 1) - pages_for(seq.num_computed) for seq in self._running
        )
        watermark = int(self._limits.watermark * stats.limit_pages)
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_num_seqs:
            sequence = self._waiting[0]
            # One more than is known: the token that this sequence will sample.
            pages = pages_for(sequence.num_tokens + 1)
            if pages + (watermark if self._running else 0) > room:
                break
            slot = self._memory.alloc_slot()
            if slot is None:
                break
            self._waiting.popleft()
            sequence.slot = slot
            sequence.status = SequenceStatus.RUNNING
            self._running.append(sequence)
            room -= pages
            item = _take(sequence, budget)
            plan.append(item)
            budget -= item.num_new
        return len(plan) > num_before

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        sequence.status = SequenceStatus.WAITING
        sequence.request.metrics.num_preemptions += 1
        self._waiting.appendleft(sequence)
        self.num_preemptions_total += 1

    def _release(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._memory.release(sequence.slot)
        sequence.slot = None


def _take(sequence: Sequence, budget: int) -> ScheduledSequence:
    assert sequence.slot is not None
    num_new = min(sequence.num_uncomputed, budget)
    return ScheduledSequence(sequence, sequence.slot, sequence.num_computed, num_new)


def _growths(plan: list[ScheduledSequence]) -> list[Growth]:
    return [Growth(item.slot, item.num_past + item.num_new) for item in plan]
