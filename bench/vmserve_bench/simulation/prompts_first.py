"""The PagedAttention paper's policy, as its first implementation had it, to compare with.

A step reads prompts or decodes, never both, and prompts come first. When decoding outgrows the pool
the last arrival is preempted; its tokens are computed again (SOSP 2023, section 4.5). There a
prompt above the token budget was refused; here it is read in several steps of prompts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vmserve.memory.base import MemoryPlan, Regime
from vmserve.scheduler.base import (
    NoRoomError,
    StepInProgress,
    StepPlan,
    Totals,
    no_drafts,
    none_comes,
)
from vmserve.scheduler.budget import SchedulerLimits, StepBudget
from vmserve.scheduler.order import Order
from vmserve.scheduler.rooms import Rooms, open_memory, release_memory
from vmserve.scheduler.sequence import Request, Sequence, SequenceStatus

if TYPE_CHECKING:
    from vmserve.memory.base import KVMemory
    from vmserve.scheduler.base import AddDrafts, MayCome

__all__ = ["PromptsFirst"]


class PromptsFirst:
    """A scheduler of requests with one sequence each, in block tables."""

    awaits_memory = False

    def __init__(self, memory: KVMemory, limits: SchedulerLimits) -> None:
        self._memory = memory
        self._limits = limits
        self._rooms = Rooms(memory, limits)
        self._order = Order(limits, time.monotonic)
        self.totals = Totals()

    @property
    def num_running(self) -> int:
        return len(self._order.running)

    @property
    def num_waiting(self) -> int:
        return len(self._order.waiting)

    @property
    def running_request_ids(self) -> list[str]:
        return [sequence.request.request_id for sequence in self._order.running]

    # -- requests -----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Raises ``ValueError`` for a request with several sequences."""
        if request.is_gang or request.num_branches > 1:
            raise ValueError("this policy is for requests with one sequence each")
        self._order.wait(request.sequences[0])

    def abort(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.status is not SequenceStatus.FINISHED:
                self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        self._order.leave(sequence)
        sequence.status = SequenceStatus.FINISHED
        if sequence.memory_id is not None:
            release_memory(self._memory, sequence)

    def start_over(self, requests: Iterable[Request], ended: Iterable[Request]) -> None:
        self._order = Order(self._limits, time.monotonic)
        for request in (*ended, *requests):
            for sequence in request.sequences:
                sequence.memory_id, sequence.num_computed = None, 0
                sequence.status = SequenceStatus.FINISHED
        for request in requests:
            self.add(request)

    def suspect(self) -> str | None:
        every = [*self._order.running, *self._order.waiting]
        return every[-1].request.request_id if every else None

    def fork(self, parent: Sequence, child: Sequence) -> None:
        raise ValueError("this policy is for requests with one sequence each")

    def convert(self, request: Request, regime: Regime, reason: str = "converted") -> None:
        """All sequences stay in block tables."""

    # -- the step -----------------------------------------------------------------------

    def schedule(
        self,
        *,
        ahead: bool = False,
        add_drafts: AddDrafts = no_drafts,
        may_come: MayCome = none_comes,
    ) -> StepPlan | None:
        """Prompts if there is room for one, else decodes."""
        if ahead:
            return None
        plan = self._read_prompts() or self._decode()
        if plan is None and self._order.waiting:
            request_id = self._order.waiting[0].request.request_id
            raise NoRoomError(request_id, "the next request needs more than the KV cache has")
        return plan

    def _read_prompts(self) -> StepPlan | None:
        step, budget, running = StepInProgress(), StepBudget.within(self._limits), self.num_running
        for sequence in self._order.running:
            reads = sequence.num_computed < sequence.num_prompt or sequence.num_uncomputed > 1
            if reads and budget.can_take(sequence):
                step.append(budget.take(sequence))
        room = self._rooms.left(self._order.running) - (self._rooms.watermark if running else 0)
        while self._order.waiting and self.num_running < self._limits.max_num_seqs:
            sequence = self._order.waiting[0]
            sequence.regime = Regime.PAGED
            room -= self._rooms.next_token(sequence)
            if room < 0 or not budget.can_take(sequence):
                break
            open_memory(self._memory, sequence)
            self._order.leave(sequence)
            self._order.run(sequence)
            step.append(budget.take(sequence))
        return self._plan(step) if step else None

    def _decode(self) -> StepPlan | None:
        while running := self._order.running:
            budget = StepBudget.within(self._limits)
            step = budget.take_next_tokens([seq for seq in running if seq.num_uncomputed == 1])
            if plan := self._plan(step):
                return plan
            if not self._preempt_last():
                name = running[0].request.request_id
                raise NoRoomError(name, "a request that runs alone needs more than there is")
        return None

    def _plan(self, step: StepInProgress) -> StepPlan | None:
        columns = step.columns(self._limits.window)
        memory = self._memory.plan(columns.growths)
        return StepPlan.of(step, columns, memory) if isinstance(memory, MemoryPlan) else None

    def _preempt_last(self) -> bool:
        if self.num_running < 2:
            return False
        sequence = self._order.running[-1]
        self._order.leave(sequence)
        release_memory(self._memory, sequence)
        sequence.num_computed = 0
        self._order.wait(sequence)
        sequence.request.metrics.num_preemptions += 1
        self.totals.preemptions += 1
        return True

    def make_room(self) -> bool:
        return self._preempt_last()

    def give_way(self) -> bool:
        return self._preempt_last()

    def wanted_pages(self) -> int:
        blocks = sum(self._rooms.owed(sequence) for sequence in self._order.running)
        return -(-blocks // self._rooms.blocks_per_page)

    def applied(self, plan: StepPlan) -> None:
        pass

    def computed(self, plan: StepPlan) -> None:
        for sequence, num_computed in zip(plan.sequences, plan.ends.tolist(), strict=True):
            sequence.num_computed = num_computed

    def accepted(self, sequence: Sequence, num_accepted: int) -> None:
        sequence.num_computed += num_accepted
