"""First come, first served, under a token budget, with chunked prefill.

Each step spends ``max_num_batched_tokens``: first one token for every decoding sequence, so that a
long prompt never stalls running answers; then chunks of the prompts being read, in order of
arrival; then admissions.

A sequence is admitted only if all its known tokens fit besides what running sequences may still
need, so a newcomer never causes the preemption of a half-read prompt. When decoding outgrows the
pool, the last arrival is preempted: its tokens are computed again later, or swapped to host memory
(SOSP'23 PagedAttention §4.5), as :mod:`vmserve.scheduler.preemption` decides. Beams of one request
wait for each other, so they are preempted together. Swapped sequences come back before anything is
admitted. Requests of higher priority, and tenants below their share, may take places from running
ones (:mod:`vmserve.scheduler.claims`).

A step is made in one direction: who is next (``order``, ``fairness``, ``claims``), how many tokens
(``budget``), who comes in (``admission``, by ``rooms`` and ``families``), in which view
(``regime``), what memory that takes (``planning``), and who gives it up (``preemption``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import chain, islice
from operator import attrgetter

from vmserve.memory.base import Attach, Fork, KVMemory, Regime, Shortfall, SwapIn
from vmserve.scheduler.admission import Admission
from vmserve.scheduler.base import (
    AddDrafts,
    MayCome,
    NoRoomError,
    StepInProgress,
    StepPlan,
    Totals,
    no_drafts,
    none_comes,
)
from vmserve.scheduler.budget import SchedulerLimits, StepBudget
from vmserve.scheduler.claims import Claims
from vmserve.scheduler.fairness import OneTenant, TenantShares
from vmserve.scheduler.families import Families
from vmserve.scheduler.order import Order
from vmserve.scheduler.planning import StepPlanner, start_with
from vmserve.scheduler.preemption import CopiesOut, Preempter, PreemptionPolicy
from vmserve.scheduler.regime import RegimePolicy
from vmserve.scheduler.regime_keeper import RegimeKeeper
from vmserve.scheduler.rooms import Rooms, open_memory
from vmserve.scheduler.sequence import Request, Sequence, SequenceStatus, with_its_gang

__all__ = ["FCFSScheduler", "SchedulerLimits"]


class FCFSScheduler:
    """See the module's docstring. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        memory: KVMemory,
        limits: SchedulerLimits,
        regimes: RegimePolicy | None = None,
        preemption: PreemptionPolicy | None = None,
        shares: TenantShares | OneTenant | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._limits = limits
        self._rooms = Rooms(memory, limits)
        self._preemption_policy = preemption or PreemptionPolicy("recompute")
        self._regime_policy = regimes or RegimePolicy("virtual")
        self._shares = shares or OneTenant()
        self._clock = clock
        self.totals = Totals()
        self._begin_empty()

    def _begin_empty(self) -> None:
        memory, limits, rooms, shares = self._memory, self._limits, self._rooms, self._shares
        self._order = order = Order(limits, self._clock)
        self._running, self._waiting, self._swapped = order.running, order.waiting, order.swapped
        self._families = families = Families(
            memory, order, limits.narrowest_window or limits.window
        )
        self._regimes = regimes = RegimeKeeper(self._regime_policy, memory, order)
        self._claims = claims = Claims(limits, order, rooms, regimes, shares)
        self._admission = Admission(memory, limits, order, families, rooms, regimes, claims, shares)
        self._copies = copies = CopiesOut(memory, rooms, self._preemption_policy)
        self._planner = StepPlanner(memory, limits, order, regimes, copies)
        self._preempter = Preempter(
            memory,
            order,
            families,
            rooms,
            regimes,
            copies,
            self._preemption_policy,
            self.totals,
        )
        #: Whether the system refused memory below the limit. Nothing is then admitted while
        #: sequences run, until one of them ends, or the refusal would repeat at each step.
        self._admission_paused = False
        #: Says whether more memory may come, for the step that is planned.
        self._may_come: MayCome = none_comes
        #: Last reason in this step why admitted newcomers had to wait again.
        self._last_shortfall: Shortfall | None = None
        self.awaits_memory = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running_request_ids(self) -> list[str]:
        return list(dict.fromkeys(sequence.request.request_id for sequence in self._running))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._families.num_following + len(self._swapped)

    # -- requests -----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue the request's first sequence; the others follow it."""
        self._shares.arrived(request)
        self._families.arrive(request)

    def finish(self, sequence: Sequence) -> None:
        self._order.leave(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self._admission_paused = False
        self.awaits_memory = False  # its own is free
        self._regimes.forget(sequence)
        self._families.end(sequence)
        if sequence.request.finished:
            self._shares.left(sequence.request)

    def abort(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.status is not SequenceStatus.FINISHED:
                self.finish(sequence)
        self._families.drop_donor(request)

    def suspect(self) -> str | None:
        """The request to end if planning failed: what was being started, else the last arrival."""
        if self._admission.starting is not None:
            return self._admission.starting.request.request_id
        arrivals = [*self._running, *self._swapped, *self._waiting]
        last = max(arrivals, key=lambda seq: seq.request.arrival, default=None)
        return None if last is None else last.request.request_id

    def start_over(self, requests: Iterable[Request], ended: Iterable[Request]) -> None:
        """Queue ``requests`` anew, and nothing else, also after a call that ended halfway.

        They are computed again, as after a preemption. All memory must have been released.
        """
        self._begin_empty()
        for request in ended:
            for sequence in request.sequences:
                sequence.memory_id = sequence.start = None
                sequence.status = SequenceStatus.FINISHED
            self._shares.left(request)
        for request in requests:
            self._resume(request)

    def _resume(self, request: Request) -> None:
        self._shares.arrived(request)
        for sequence in request.sequences:  # those that have ended may have been kept as donors
            sequence.memory_id = sequence.start = None
        left = [seq for seq in request.sequences if seq.status is not SequenceStatus.FINISHED]
        for sequence in left:
            sequence.was_preempted = sequence.was_preempted or sequence.num_computed > 0
            sequence.num_computed = sequence.num_published = 0
            sequence.status = SequenceStatus.FOLLOWING
        for sequence in left:
            self._families.wait(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        assert parent.memory_id is not None
        self._regimes.inherit(parent, child)
        child.is_raised = parent.is_raised
        open_memory(self._memory, child)
        assert child.memory_id is not None, "beams that ended were finished before the forks"
        child.start = Fork(child.memory_id, parent.memory_id, parent.num_computed)
        child.num_computed = child.num_published = parent.num_computed
        self._order.run(child)

    def convert(self, request: Request, regime: Regime, reason: str = "converted") -> None:
        self._regimes.convert(request, regime, reason)

    def applied(self, plan: StepPlan) -> None:
        self._planner.applied(plan)
        self._families.drop_unwanted()

    def computed(self, plan: StepPlan) -> None:
        if plan.only_decodes:  # most steps
            for sequence in plan.sequences:
                sequence.num_computed += 1
        else:
            for sequence, num_computed in zip(plan.sequences, plan.ends.tolist(), strict=True):
                sequence.num_computed = num_computed
        self._shares.computed(plan)

    def accepted(self, sequence: Sequence, num_accepted: int) -> None:
        sequence.num_computed += num_accepted
        self._shares.accepted(sequence.request, num_accepted)

    # -- the step -----------------------------------------------------------------------

    def schedule(
        self,
        *,
        ahead: bool = False,
        add_drafts: AddDrafts = no_drafts,
        may_come: MayCome = none_comes,
    ) -> StepPlan | None:
        self._planner.add_drafts, self._may_come = add_drafts, may_come
        try:
            self._regimes.reconsider()
            return self._schedule_ahead() if ahead else self._schedule_step()
        finally:  # both know the scheduler: there should be no circle
            self._planner.add_drafts, self._may_come = no_drafts, none_comes

    def _schedule_step(self) -> StepPlan | None:
        self.awaits_memory, self._last_shortfall = False, None
        plan = self._schedule()
        while plan is None and not self.awaits_memory and self._break_deadlock():
            plan = self._schedule()
        return plan

    def _schedule(self) -> StepPlan | None:
        self._begin()
        self._preempt_for_claims()
        preempted_before = self.totals.preemptions
        step, plan = self._schedule_running()
        if self.awaits_memory:
            return None
        # If only waiting beams run, the sequence just preempted may be the one to continue.
        if self.totals.preemptions == preempted_before or not step:
            plan = self._with_admitted(step, plan)
        return plan if step else None

    def _schedule_ahead(self) -> StepPlan | None:
        """Running sequences as far as there is room, and newcomers with them."""
        self._begin()
        while (claim := self._claims.find()) is not None:
            if claim.victims:
                return None
            self._claims.grant(claim)
        step = self._share_budget()
        plan = self._planner.plan(step)
        if not isinstance(plan, StepPlan):
            return None
        return self._with_admitted(step, plan)

    def _begin(self) -> None:
        self._families.start_ready()
        self.totals.raised += self._order.raise_waiting()
        self._planner.begin()

    def _preempt_for_claims(self) -> None:
        """Preempt the victims of claims; :class:`Admission` then serves the claimants first."""
        if self._admission_paused:
            return
        while (claim := self._claims.find()) is not None:
            for group, reason in claim.victims:
                # Forks that had not started have left with their parent.
                if victims := [seq for seq in group if seq.status is SequenceStatus.RUNNING]:
                    room_to_swap = len(self._swapped) + len(victims) <= self._limits.max_num_seqs
                    self._preempter.preempt(victims, may_swap=room_to_swap)
                    self.totals.priority_preemptions += reason == "priority"
                    self.totals.fairness_preemptions += reason == "fairness"
            self._claims.grant(claim)

    def _schedule_running(self) -> tuple[StepInProgress, StepPlan | None]:
        """Plan decodes, then prompt chunks; preempt from the back until it fits."""
        while self._running:
            step, answer = self._planner.plan_during_copies(self._share_budget())
            if isinstance(answer, StepPlan):
                return step, answer
            if answer.missing_mappings and self._regimes.leave_slots():
                continue  # block tables need no mappings
            if self._waits_for_memory(answer):
                break
            if self._preempter.drop_donors() or self._preempt_last() or self._start_alone():
                continue
            if self._waits_for_memory(answer, is_last_resort=True):
                break
            # The engine checks at start that the pool holds the longest sequence. So several beams
            # share it, or the system does not give pages back.
            raise NoRoomError(self._running[0].request.request_id, _no_room_alone(answer))
        return StepInProgress(), None

    def _share_budget(self) -> StepInProgress:
        """Grant running sequences their tokens: one to each that decodes, the rest to prompts."""
        granted = self._claims.granted
        if len(self._running) <= self._limits.max_num_batched_tokens and not granted:
            everybody = StepInProgress.one_token_each(self._running, self._limits.window)
            if everybody is not None:  # most steps: all decode
                return everybody
        budget = StepBudget.within(self._limits)
        decoding = [seq for seq in self._running if len(seq.tokens) - seq.num_computed == 1]
        step = budget.take_next_tokens(decoding)
        prompts = [seq for seq in self._running if seq.num_uncomputed > 1]
        if not granted and not self._shares.divides:
            for sequence in prompts:
                if budget.can_take(sequence):
                    step.append(budget.take(sequence))
            return step
        # Keep tokens for sequences that are about to start.
        readers = sorted([*prompts, *granted], key=attrgetter("order"))
        parts = budget.divide(readers, self._shares.tenant_of)
        for sequence, most in zip(readers, parts, strict=True):
            if sequence.status is not SequenceStatus.RUNNING:
                step.kept[sequence] = most
            elif most and budget.can_take(sequence):
                step.append(budget.take(sequence, most))
        return step

    def _with_admitted(self, step: StepInProgress, plan: StepPlan | None) -> StepPlan | None:
        """Add newcomers to the step. ``plan``: of the step before; the result is None for no
        step."""
        newcomers = self._admission.admit(step, admission_paused=self._admission_paused)
        if newcomers:
            plan = self._plan_with_newcomers(step, newcomers)
        elif plan is not None and self._admission.has_deferred:
            plan = self._planner.plan_again(step)
        return plan if step else None

    def _plan_with_newcomers(
        self, step: StepInProgress, newcomers: list[Sequence]
    ) -> StepPlan | None:
        """Plan with newcomers; those that do not fit after all wait again, last first.

        Using a cached prefix can cost one page more than computing it, because a page of which only
        a part is used is copied. So the last newcomer first tries without its prefix.
        """
        while step and newcomers:
            answer = self._planner.plan(step)
            if isinstance(answer, StepPlan):
                return answer
            self._last_shortfall = answer
            newcomer = newcomers[-1]
            if isinstance(newcomer.start, Attach):
                start_with(newcomer, 0)
                self._planner.grant_again(step, [newcomer])
                continue
            # Beams come back from the host together.
            is_swapped = isinstance(newcomer.start, SwapIn)
            group = with_its_gang(newcomer, newcomers) if is_swapped else [newcomer]
            step.drop(group)
            for sequence in group:
                newcomers.remove(sequence)
                if is_swapped:
                    self._preempter.back_to_host(sequence)
                else:
                    self._preempter.back_to_waiting(sequence)
        return self._planner.plan_again(step) if step else None

    # -- where memory is short ----------------------------------------------------------

    def _break_deadlock(self) -> bool:
        """Nothing can compute: give up one thing that stands in the way; False if all is done.

        Each call leaves less kept or less running, or more pages at hand. So this ends, with a step
        or with an error for the request that does not fit even alone.
        """
        if self._admission_paused:
            self._admission_paused = False
            return True
        if self._memory.settle():  # newcomers are admitted by what is available
            return True
        lacks = self._last_shortfall
        if self.num_running + self.num_waiting and self._waits_for_memory(lacks):
            return False
        if self._preempter.drop_donors():
            return True
        gangs = list(dict.fromkeys(sequence.request for sequence in self._running))
        if gangs:
            # All of them wait for beams for which the others leave no room.
            if len(gangs) > 1 or self._others_wait_first(gangs[0]):
                victims = [seq for seq in self._running if seq.request is gangs[-1]]
                # If swapped, they would come back first.
                self._preempter.preempt(victims, may_swap=False)
                return True
            if self._waits_for_memory(lacks, is_last_resort=True):
                return False
            raise NoRoomError(gangs[0].request_id, self._no_room("the beams of a request"))
        if self._swapped:
            # Swapped sequences share nothing: they may fit when computed again.
            for sequence in list(self._swapped):
                self._preempter.compute_again(sequence)
            return True
        if self._waiting and not self._waits_for_memory(lacks, is_last_resort=True):
            request_id = self._admission.next_waiting().request.request_id
            raise NoRoomError(request_id, self._no_room("the next request"))
        return False

    def _others_wait_first(self, gang: Request) -> bool:
        """Whether a sequence before ``gang`` in the order waits, which is why its beams wait."""
        first = [*self._swapped[:1], *([self._admission.next_waiting()] if self._waiting else [])]
        return any(seq.request is not gang for seq in first)

    def _no_room(self, who: str) -> str:
        if self._last_shortfall is not None and self._last_shortfall.missing_mappings:
            return _no_room_alone(self._last_shortfall)
        return (
            f"{who} needs more than the {self._memory.available_pages()} pages of the KV cache "
            f"that can be had, of {self._memory.limit_pages}: raise --kv-cache-memory, unpin "
            "prefixes, or lower the beam width"
        )

    def _waits_for_memory(self, lacks: Shortfall | None, *, is_last_resort: bool = False) -> bool:
        """Put the step off, if pages have been asked for and may come soon; nobody lends mappings.

        ``lacks``: what a plan lacked, if one was made.
        """
        if (lacks is None or lacks.missing_pages) and self._may_come(is_last_resort=is_last_resort):
            self.awaits_memory = True
        return self.awaits_memory

    def _preempt_last(self) -> bool:
        """Preempt the last arrival, with its beams; False if nothing else would run."""
        if not self._running:
            return False
        victims = self._claims.victims_of_shortage()
        if len(victims) == len(self._running):
            return False
        self._preempter.preempt(victims)
        return True

    def _start_alone(self) -> bool:
        """Let a sequence that runs alone and borrowed blocks start over, once; False if it cannot.

        It may hold pages of which it uses only one block and which a parked slot keeps from being
        packed. Computed from nothing it has whole pages.
        """
        if len(self._running) != 1 or self._running[0].request.is_gang:
            return False
        [sequence] = self._running
        if sequence.starts_over or not sequence.borrowed:
            return False
        sequence.starts_over = True
        self._preempter.preempt([sequence], may_swap=False)
        return True

    def make_room(self) -> bool:
        if self._regimes.drop_conversions() or self._preempter.drop_donors():
            return True
        self._admission_paused = self._preempt_last()
        return self._admission_paused

    def give_way(self) -> bool:
        return self._preempter.drop_donors() or self._preempt_last()

    def wanted_pages(self) -> int:
        blocks = sum(self._rooms.owed(seq) for seq in self._running)
        places = max(0, self._limits.max_num_seqs - len(self._running))
        for sequence in islice(chain(self._swapped, self._waiting), places):
            blocks += self._rooms.at_most(sequence)
        return -(-blocks // self._rooms.blocks_per_page)


def _no_room_alone(answer: Shortfall) -> str:
    if answer.missing_mappings:
        return (
            f"a request that runs alone needs {answer.needed_mappings:,} memory mappings for its "
            f"next tokens and {answer.available_mappings:,} can be had (of vm.max_map_count): "
            "raise that limit, or use larger pages (--kv-page-size) or --kv-regime auto"
        )
    return (
        f"a request that runs alone needs {answer.needed_pages} pages of the KV cache "
        f"and {answer.available_pages} can be had: raise --kv-cache-memory, or lower "
        "the beam width or --max-model-len"
    )
