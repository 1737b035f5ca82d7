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

from vmserve.errors import OutOfMemoryError
from vmserve.memory.base import Attach, Growth, KVMemory, MemoryPlan
from vmserve.scheduler.base import ScheduledSequence, StepPlan
from vmserve.scheduler.sequence import Request, Sequence, SequenceStatus

__all__ = ["FCFSScheduler", "SchedulerLimits"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    #: Share of the pool that admission leaves free while something runs, as room to decode.
    watermark: float = 0.01
    #: The widest sliding window of the model's layers; None if a layer sees everything.
    window: int | None = None


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
    def running_request_ids(self) -> list[str]:
        return [sequence.request.request_id for sequence in self._running]

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
        if self.num_preemptions_total == preempted_before:
            attached = self._admit(plan, memory_plan)
            if attached is not None:
                memory_plan = self._plan_with_newcomers(plan, attached)
        if not plan:
            return None
        assert memory_plan is not None
        return StepPlan(tuple(plan), memory_plan)

    def _plan_with_newcomers(
        self, plan: list[ScheduledSequence], attached: list[Attach]
    ) -> MemoryPlan | None:
        """Newcomers that do not fit after all (a slot is short, say) wait again, last first.

        Taking a prefix from the cache can cost a page more than computing it: a page of which
        only a part is wanted is copied. The last newcomer then starts from nothing.
        """
        while plan:
            answer = self._memory.plan(_growths(plan, self._limits.window), attached)
            if isinstance(answer, MemoryPlan):
                return answer
            newcomer = plan.pop().sequence
            hit = next((op for op in attached if op.seq == newcomer.memory_id), None)
            if hit is None:
                self._back_to_waiting(newcomer)
                continue
            attached.remove(hit)
            newcomer.num_computed = 0
            newcomer.request.metrics.num_cached_tokens = 0
            plan.append(_take(newcomer, self._left_for(plan)))
        return None

    def _left_for(self, plan: list[ScheduledSequence]) -> int:
        return self._limits.max_num_batched_tokens - sum(item.num_new for item in plan)

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

    def _schedule_running(self) -> tuple[list[ScheduledSequence], MemoryPlan | None]:
        """Decodes, then prompt chunks; preempts from the back until it fits."""
        while self._running:
            plan = self._share_budget()
            fits = self._memory.plan(_growths(plan, self._limits.window))
            if isinstance(fits, MemoryPlan):
                return plan, fits
            if self._preempt_last() is None:
                # The engine checks at start that the pool holds the longest sequence: only pages
                # that the system does not take back (quarantined) can be what is missing.
                raise OutOfMemoryError(
                    f"one sequence alone needs {fits.needed_pages} pages of the KV cache and "
                    f"{fits.available_pages} can be had: lower --max-model-len or restart"
                )
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

    def _admit(
        self, plan: list[ScheduledSequence], running: MemoryPlan | None
    ) -> list[Attach] | None:
        """Add newcomers to ``plan`` while budget, slots and memory last.

        Returns what they take from the prefix cache; None if nobody came.
        """
        budget = self._left_for(plan)
        if budget == 0 or not self._waiting or self._is_short:
            return None
        num_before = len(plan)
        pages_for = self._memory.layout.pages_for
        # What a newcomer may take, once every running sequence has what it is owed.
        room = self._memory.available_pages() - sum(
            pages_for(seq.num_tokens + 1) - pages_for(seq.num_computed) for seq in self._running
        )
        watermark = int(self._limits.watermark * self._memory.limit_pages)
        attached: list[Attach] = []
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_num_seqs:
            sequence = self._waiting[0]
            # One more than is known: the token that this sequence will sample.
            pages = pages_for(sequence.num_tokens + 1)
            if pages + (watermark if self._running else 0) > room:
                break
            hit = self._open(sequence)
            if hit is None:
                break
            if hit.num_tokens:
                attached.append(hit)
            self._waiting.popleft()
            sequence.status = SequenceStatus.RUNNING
            self._running.append(sequence)
            room -= pages
            item = _take(sequence, budget)
            plan.append(item)
            budget -= item.num_new
        return attached if len(plan) > num_before else None

    def _open(self, sequence: Sequence) -> Attach | None:
        """The sequence's place in memory, and what the prefix cache has of it."""
        request = sequence.request
        memory_id = self._memory.open(sequence.tokens, salt=request.cache_salt)
        if memory_id is None:
            return None
        sequence.memory_id = memory_id
        # Whoever asks for the prompt's log-probabilities needs its logits computed.
        wants_logits = request.params.prompt_logprobs is not None
        hit = 0 if wants_logits else self._memory.match(memory_id)
        sequence.num_computed = hit
        if sequence.num_output == 0:
            request.metrics.num_cached_tokens = hit
        return Attach(memory_id, hit)

    def _preempt(self, sequence: Sequence) -> None:
        self._back_to_waiting(sequence)
        sequence.request.metrics.num_preemptions += 1
        self.num_preemptions_total += 1

    def _back_to_waiting(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        sequence.status = SequenceStatus.WAITING
        self._waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.memory_id is not None
        self._memory.release(sequence.memory_id)
        sequence.memory_id = None


def _take(sequence: Sequence, budget: int) -> ScheduledSequence:
    assert sequence.memory_id is not None
    num_new = min(sequence.num_uncomputed, budget)
    return ScheduledSequence(sequence, sequence.memory_id, sequence.num_computed, num_new)


def _growths(plan: list[ScheduledSequence], window: int | None) -> list[Growth]:
    """``window``: how many positions any layer sees; older ones are not needed any more."""
    if window is None:
        return [Growth(item.memory_id, item.num_past + item.num_new) for item in plan]
    return [
        Growth(item.memory_id, item.num_past + item.num_new, max(0, item.num_past - window + 1))
        for item in plan
    ]
