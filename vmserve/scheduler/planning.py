"""Plan a step's memory: from the tokens that sequences are granted to a plan that fits.

What a plan depends on may be gone until it is made: cached prefixes with which sequences were to
start are evicted, pages are taken for blocks that are read from a store, copies to the host are
under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vmserve.memory.base import Attach, MemoryOp, MemoryPlan, Shortfall
from vmserve.scheduler.base import StepInProgress, StepPlan, no_drafts
from vmserve.scheduler.budget import SchedulerLimits, StepBudget

if TYPE_CHECKING:
    from vmserve.memory.base import KVMemory
    from vmserve.scheduler.base import AddDrafts
    from vmserve.scheduler.order import Order
    from vmserve.scheduler.preemption import CopiesOut
    from vmserve.scheduler.regime_keeper import RegimeKeeper
    from vmserve.scheduler.sequence import Sequence

__all__ = ["StepPlanner", "start_with"]


def start_with(sequence: Sequence, num_cached: int) -> None:
    """Let a sequence that was to start with a cached prefix start with so many tokens of it."""
    start = sequence.start
    assert isinstance(start, Attach)
    sequence.start = Attach(start.seq, num_cached) if num_cached else None
    sequence.num_computed = num_cached
    if sequence.num_output == 0:
        sequence.request.metrics.num_cached_tokens = num_cached


class StepPlanner:
    """Plans running sequences; asks for conversions and drafts as far as there is room."""

    def __init__(
        self,
        memory: KVMemory,
        limits: SchedulerLimits,
        order: Order,
        regimes: RegimeKeeper,
        copies: CopiesOut,
    ) -> None:
        self._memory = memory
        self._limits = limits
        self._running = order.running
        self._regimes = regimes
        self._copies = copies
        #: Source of drafts for the step that is planned.
        self.add_drafts: AddDrafts = no_drafts
        #: Whether a step was planned and not applied.
        self._has_unapplied_plan = False

    def begin(self) -> None:
        """A step is about to be planned."""
        if self._has_unapplied_plan:
            self._recheck_starts()
        self._has_unapplied_plan = True

    def applied(self, plan: StepPlan) -> None:
        self._has_unapplied_plan = False
        if plan.memory.ops:
            for sequence in self._running:
                sequence.start = None
            self._regimes.converted(plan.memory.ops)

    def plan(self, step: StepInProgress) -> StepPlan | Shortfall:
        """Plan the step. A sequence whose cached prefix is gone by now computes it, as far as the
        step has tokens left."""
        answer = self._try(step)
        while isinstance(answer, Shortfall) and answer.lost_prefixes:
            self.grant_again(step, self._recheck_starts() or self._give_up_prefixes())
            answer = self._try(step)
        return answer

    def _try(self, step: StepInProgress) -> StepPlan | Shortfall:
        """Plan with the requested conversions and with drafts, as far as there is memory for them
        now; drafts keep no conversion waiting."""
        columns = step.columns(self._limits.window)
        drafted = self.add_drafts(step, columns)
        starts: list[MemoryOp] = []
        # Waiting beams may start too.
        if columns.has_starts or len(step) < len(self._running):
            starts = [seq.start for seq in self._running if seq.start is not None]
        conversions = self._regimes.conversions()
        for ops in ([*starts, *conversions], starts) if conversions else (starts,):
            if drafted is not None:
                answer = self._memory.plan(drafted.columns.growths, ops)
                if isinstance(answer, MemoryPlan):
                    return StepPlan.with_drafts(step, drafted, answer)
            answer = self._memory.plan(columns.growths, ops)
            if isinstance(answer, MemoryPlan):
                return StepPlan.of(step, columns, answer)
        assert isinstance(answer, Shortfall)
        return answer

    def plan_during_copies(
        self, step: StepInProgress
    ) -> tuple[StepInProgress, StepPlan | Shortfall]:
        """Plan one step during copies to the host; if that is not possible, wait for the copies
        and plan. Returns what of the step was planned, too."""
        if not self._memory.is_copying:
            return step, self.plan(step)
        with self._memory.without_waiting():
            answer = self.plan(step)
            if isinstance(answer, StepPlan):
                return step, answer
            others = self._copies.leave_out(step)
            answer = self.plan(others) if others else answer
            if isinstance(answer, StepPlan):
                return others, answer
        self._copies.finish()
        return step, self.plan(step)

    def plan_again(self, step: StepInProgress) -> StepPlan | None:
        """Plan after pages were taken for a prefix that is being read; None if they are needed."""
        answer = self.plan(step)
        if not isinstance(answer, StepPlan):
            self._memory.finish_restores()
            answer = self.plan(step)
        return answer if isinstance(answer, StepPlan) else None

    def grant_again(self, step: StepInProgress, sequences: list[Sequence]) -> None:
        """Grant these what they have to compute by now, from what the others leave."""
        step.drop(sequences)
        budget = StepBudget.within(self._limits)
        budget.spend(step)
        for sequence in sequences:
            if budget.can_take(sequence):
                step.append(budget.take(sequence))

    def _recheck_starts(self) -> list[Sequence]:
        """Let sequences that have not started yet start with what is still cached of their
        prefixes; returns those that have lost some."""
        lost = []
        for sequence in self._running:
            if not isinstance(start := sequence.start, Attach):
                continue
            if (hit := self._memory.match(start.seq)) < start.num_tokens:
                start_with(sequence, hit)
                lost.append(sequence)
        return lost

    def _give_up_prefixes(self) -> list[Sequence]:
        """Let all that have not started yet start without cached prefixes; returns them."""
        starting = [seq for seq in self._running if isinstance(seq.start, Attach)]
        for sequence in starting:
            start_with(sequence, 0)
        return starting
