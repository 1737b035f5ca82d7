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
ones (:mod:`vmserve.scheduler.claims`); low priorities that have waited for long are raised
(:mod:`vmserve.scheduler.ageing`).

The sequences of one request share its prompt. The first computes it; the others *follow* (they are
in no queue) and start as forks of it, at first and after each preemption.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from itertools import chain, islice
from operator import attrgetter

from vmserve.memory.base import (
    Attach,
    Fork,
    KVMemory,
    MemoryOp,
    MemoryPlan,
    Regime,
    Shortfall,
    SwapIn,
)
from vmserve.scheduler.admission import Admission
from vmserve.scheduler.ageing import Ageing
from vmserve.scheduler.base import (
    AddDrafts,
    MayCome,
    NoRoomError,
    StepInProgress,
    StepPlan,
    no_drafts,
    none_comes,
)
from vmserve.scheduler.budget import SchedulerLimits, StepBudget
from vmserve.scheduler.claims import ClaimReason, Claims
from vmserve.scheduler.copies import CopiesOut
from vmserve.scheduler.donors import Donors, open_memory, release_memory
from vmserve.scheduler.fairness import TenantShares
from vmserve.scheduler.following import Following
from vmserve.scheduler.forecast import BlockForecast, ForecastAlone
from vmserve.scheduler.preemption import PreemptionPolicy
from vmserve.scheduler.queues import Queues
from vmserve.scheduler.regime import RegimePolicy
from vmserve.scheduler.regime_keeper import RegimeKeeper
from vmserve.scheduler.sequence import Request, Sequence, SequenceStatus
from vmserve.scheduler.siblings import computes_prompt, has_followers, is_fork_of, with_its_gang

__all__ = ["FCFSScheduler", "SchedulerLimits"]

logger = logging.getLogger(__name__)


class FCFSScheduler:
    """See the module's docstring. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        memory: KVMemory,
        limits: SchedulerLimits,
        regimes: RegimePolicy | None = None,
        preemption: PreemptionPolicy | None = None,
        shares: TenantShares | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._limits = limits
        self._forecast = BlockForecast(memory.layout)
        self._preemption = preemption or PreemptionPolicy("recompute")
        self._policy = regimes or RegimePolicy("virtual")
        self._shares = shares
        self._clock = clock
        self.num_preemptions_total = 0
        #: Preemptions for claims, by reason.
        self.num_preemptions_by_claim: dict[ClaimReason, int] = {"priority": 0, "fairness": 0}
        self.num_swaps_total = 0
        self._num_raised_before = 0
        self._begin_empty()

    def _begin_empty(self) -> None:
        memory, limits, shares = self._memory, self._limits, self._shares
        self._copies = CopiesOut(memory, self._forecast, self._preemption)
        self._queues = Queues()
        self._running = self._queues.running
        self._waiting = self._queues.waiting
        self._swapped = self._queues.swapped
        self._followers = Following()
        self._regimes = RegimeKeeper(self._policy, memory, self._running, self._waiting)
        self._donors = Donors(memory, limits.narrowest_window or limits.window)
        self._claims = Claims(memory, limits, self._forecast, self._queues, self._regimes, shares)
        self._admission = Admission(
            memory,
            limits,
            self._forecast,
            ForecastAlone(memory, limits.max_num_batched_tokens),
            self._queues,
            self._donors,
            self._regimes,
            self._claims,
            shares,
        )
        self._ageing: Ageing | None = None
        if limits.priority_max_wait is not None:
            self._ageing = Ageing(
                limits.priority_max_wait, limits.max_num_seqs, self._queues, self._clock
            )
        #: Whether the system refused memory below the limit. Nothing is then admitted while
        #: sequences run, until one of them ends, or the refusal would repeat at each step.
        self._admission_paused = False
        #: Source of drafts for the step that is planned, and of memory.
        self._add_drafts: AddDrafts = no_drafts
        self._may_come: MayCome = none_comes
        #: Whether a step was planned and not applied.
        self._has_unapplied_plan = False
        #: Last reason why admitted newcomers had to wait again.
        self._last_shortfall: Shortfall | None = None
        self.awaits_memory = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running_request_ids(self) -> list[str]:
        return list(dict.fromkeys(sequence.request.request_id for sequence in self._running))

    def counters(self) -> dict[str, int]:
        by_claim = self.num_preemptions_by_claim
        return {
            "num_preemptions_total": self.num_preemptions_total,
            "num_priority_preemptions_total": by_claim["priority"],
            "num_fairness_preemptions_total": by_claim["fairness"],
            "num_priority_raised_total": self._num_raised,
            "num_swapped_out_total": self.num_swaps_total,
        }

    @property
    def _num_raised(self) -> int:
        return self._num_raised_before + (0 if self._ageing is None else self._ageing.num_raised)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._followers) + len(self._swapped)

    # -- requests -----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue the request's first sequence; the others follow it."""
        if self._shares is not None:
            self._shares.arrived(request)
        first, *others = request.sequences
        self._queues.wait(first)
        for sequence in others:
            self._followers.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        self._queues.leave(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self._admission_paused = False
        elif sequence.status is SequenceStatus.FOLLOWING:
            self._followers.remove(sequence)
        self._regimes.forget(sequence)
        was_swapped = sequence.status is SequenceStatus.SWAPPED
        sequence.status = SequenceStatus.FINISHED
        request = sequence.request
        if sequence.memory_id is not None and (was_swapped or not self._donors.take(sequence)):
            release_memory(self._memory, sequence)
        self._followers.lost_member(request)
        if not has_followers(request):
            self._donors.drop(request)
        if self._shares is not None and request.finished:
            self._shares.left(request)

    def abort(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.status is not SequenceStatus.FINISHED:
                self.finish(sequence)
        self._donors.drop(request)

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
        self._num_raised_before = self._num_raised
        self._begin_empty()
        for request in ended:
            for sequence in request.sequences:
                sequence.memory_id = sequence.start = None
                sequence.status = SequenceStatus.FINISHED
            if self._shares is not None:
                self._shares.left(request)
        for request in requests:
            self._resume(request)

    def _resume(self, request: Request) -> None:
        if self._shares is not None:
            self._shares.arrived(request)
        for sequence in request.sequences:  # those that have ended may have been kept as donors
            sequence.memory_id = sequence.start = None
        left = [seq for seq in request.sequences if seq.status is not SequenceStatus.FINISHED]
        for sequence in left:
            sequence.was_preempted = sequence.was_preempted or sequence.num_computed > 0
            sequence.num_computed = sequence.num_published = 0
            sequence.status = SequenceStatus.FOLLOWING
        for sequence in left:
            self._requeue(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        assert parent.memory_id is not None
        self._regimes.inherit(parent, child)
        child.is_raised = parent.is_raised
        open_memory(self._memory, child)
        assert child.memory_id is not None, "beams that ended were finished before the forks"
        child.start = Fork(child.memory_id, parent.memory_id, parent.num_computed)
        child.num_computed = child.num_published = parent.num_computed
        self._queues.run(child)

    def convert(self, request: Request, regime: Regime, reason: str = "converted") -> None:
        self._regimes.convert(request, regime, reason)

    # -- the step -----------------------------------------------------------------------

    def applied(self, plan: StepPlan) -> None:
        self._has_unapplied_plan = False
        if plan.memory.ops:
            for sequence in self._running:
                sequence.start = None
            self._regimes.converted(plan.memory.ops)
        if self._donors:
            self._donors.drop_unwanted()

    def computed(self, plan: StepPlan) -> None:
        for sequence, num_computed in zip(plan.sequences, plan.ends.tolist(), strict=True):
            sequence.num_computed = num_computed
        if self._shares is not None:
            self._charge_tenants(plan, self._shares)

    def accepted(self, sequence: Sequence, num_accepted: int) -> None:
        sequence.num_computed += num_accepted
        if self._shares is not None:
            self._shares.served(sequence.request, num_generated=num_accepted)

    def _charge_tenants(self, plan: StepPlan, shares: TenantShares) -> None:
        """Charge tenants for what was computed, but not for what a preemption made necessary
        again."""
        columns = plan.sequences, plan.num_past.tolist(), plan.num_new.tolist(), plan.samples
        for sequence, num_past, num_new, samples in zip(*columns, strict=True):
            num_read = 0
            if num_past < sequence.num_prompt and not sequence.was_preempted:
                num_read = min(num_past + num_new, sequence.num_prompt) - num_past
            shares.served(sequence.request, num_read=num_read, num_generated=int(samples))

    def schedule(
        self,
        *,
        ahead: bool = False,
        add_drafts: AddDrafts = no_drafts,
        may_come: MayCome = none_comes,
    ) -> StepPlan | None:
        self._add_drafts, self._may_come = add_drafts, may_come
        try:
            self._regimes.reconsider()
            return self._schedule_ahead() if ahead else self._schedule_step()
        finally:  # both know the scheduler: there should be no circle
            self._add_drafts, self._may_come = no_drafts, none_comes

    def _schedule_step(self) -> StepPlan | None:
        self.awaits_memory = False
        plan = self._schedule()
        while plan is None and not self.awaits_memory and self._break_deadlock():
            plan = self._schedule()
        return plan

    def _schedule_ahead(self) -> StepPlan | None:
        """Running sequences as far as there is room, and newcomers with them."""
        self._begin()
        while (claim := self._claims.find()) is not None:
            if claim.victims:
                return None
            self._claims.grant(claim)
        draft = self._share_budget()
        plan = self._plan_memory(draft)
        if not isinstance(plan, StepPlan):
            return None
        return self._with_admitted(draft, plan)

    def _begin(self) -> None:
        for sequence in self._followers.take_ready(self._running, self._donors.sequences()):
            self._queues.wait(sequence)
        if self._ageing is not None:
            self._ageing.raise_waiting()
        if self._has_unapplied_plan:
            self._recheck_starts()
        self._has_unapplied_plan = True

    def _schedule(self) -> StepPlan | None:
        self._begin()
        self._preempt_for_claims()
        preempted_before = self.num_preemptions_total
        draft, plan = self._schedule_running()
        if self.awaits_memory:
            return None
        # If only waiting beams run, the sequence just preempted may be the one to continue.
        if self.num_preemptions_total == preempted_before or not draft:
            plan = self._with_admitted(draft, plan)
        return plan if draft else None

    def _preempt_for_claims(self) -> None:
        """Preempt the victims of claims; :class:`Admission` then serves the claimants first."""
        if self._admission_paused:
            return
        while (claim := self._claims.find()) is not None:
            for group, reason in claim.victims:
                # Forks that had not started have left with their parent.
                if victims := [seq for seq in group if seq.status is SequenceStatus.RUNNING]:
                    room_to_swap = len(self._swapped) + len(victims) <= self._limits.max_num_seqs
                    self._preempt(victims, may_swap=room_to_swap)
                    self.num_preemptions_by_claim[reason] += 1
            self._claims.grant(claim)

    def _with_admitted(self, draft: StepInProgress, plan: StepPlan | None) -> StepPlan | None:
        """Add newcomers to the draft. ``plan``: of the draft before; the result is None for no
        step."""
        newcomers = self._admission.admit(draft, admission_paused=self._admission_paused)
        if newcomers:
            plan = self._plan_with_newcomers(draft, newcomers)
        elif plan is not None and self._admission.has_deferred:
            plan = self._plan_again(draft)
        return plan if draft else None

    def _plan_again(self, draft: StepInProgress) -> StepPlan | None:
        """Plan after pages were taken for a prefix that is being read; None if they are needed."""
        answer = self._plan_memory(draft)
        if not isinstance(answer, StepPlan):
            self._memory.finish_restores()
            answer = self._plan_memory(draft)
        return answer if isinstance(answer, StepPlan) else None

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
        if self.num_running + self.num_waiting and self._waits_for_memory():
            return False
        if self._donors:
            self._drop_donors()
            return True
        gangs = list(dict.fromkeys(sequence.request for sequence in self._running))
        if gangs:
            # All of them wait for beams for which the others leave no room.
            if len(gangs) > 1 or self._others_wait_first(gangs[0]):
                victims = [seq for seq in self._running if seq.request is gangs[-1]]
                self._preempt(victims, may_swap=False)  # if swapped, they would come back first
                return True
            if self._waits_for_memory(is_last_resort=True):
                return False
            raise NoRoomError(gangs[0].request_id, self._no_room("the beams of a request"))
        if self._swapped:
            # Swapped sequences share nothing: they may fit when computed again.
            for sequence in list(self._swapped):
                self._queues.leave(sequence)
                self._release_and_requeue(sequence)
            return True
        if self._waiting and not self._waits_for_memory(is_last_resort=True):
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

    def _waits_for_memory(self, *, is_last_resort: bool = False) -> bool:
        """Put the step off, if memory has been asked for and may come soon."""
        if self._may_come(is_last_resort=is_last_resort):
            self.awaits_memory = True
        return self.awaits_memory

    def give_way(self) -> bool:
        if self._donors:
            self._drop_donors()
            return True
        return self._preempt_last()

    def wanted_pages(self) -> int:
        blocks = sum(self._forecast.owed(seq) for seq in self._running)
        places = max(0, self._limits.max_num_seqs - len(self._running))
        for sequence in islice(chain(self._swapped, self._waiting), places):
            blocks += self._forecast.at_most(sequence)
        return -(-blocks // self._forecast.blocks_per_page)

    def make_room(self) -> bool:
        if self._regimes.drop_conversions():
            return True
        if self._donors:
            self._drop_donors()
            return True
        self._admission_paused = self._preempt_last()
        return self._admission_paused

    # -- those that run -----------------------------------------------------------------

    def _schedule_running(self) -> tuple[StepInProgress, StepPlan | None]:
        """Plan decodes, then prompt chunks; preempt from the back until it fits."""
        while self._running:
            draft = self._share_budget()
            if self._memory.is_copying:
                draft, answer = self._plan_beside_copies(draft)
            else:
                answer = self._plan_memory(draft)
            if isinstance(answer, StepPlan):
                return draft, answer
            if answer.missing_mappings and self._regimes.leave_slots():
                continue  # block tables need no mappings
            if self._waits_for_memory():
                break
            if self._donors:
                self._drop_donors()
            elif not (self._preempt_last() or self._start_over()):
                if self._waits_for_memory(is_last_resort=True):
                    break
                # The engine checks at start that the pool holds the longest sequence. So several
                # beams share it, or the system does not give pages back.
                raise NoRoomError(
                    self._running[0].request.request_id,
                    _no_room_alone(answer),
                )
        return StepInProgress(), None

    def _plan_memory(self, draft: StepInProgress) -> StepPlan | Shortfall:
        """Plan the draft. A sequence whose cached prefix is gone by now computes
        it, as far as the step has tokens left."""
        answer = self._try_plan(draft)
        while isinstance(answer, Shortfall) and answer.lost_prefixes:
            self._grant_again(draft, self._recheck_starts() or self._give_up_prefixes())
            answer = self._try_plan(draft)
        return answer

    def _try_plan(self, draft: StepInProgress) -> StepPlan | Shortfall:
        """Plan with the requested conversions and with drafts, as far as there is memory for them
        now; drafts keep no conversion waiting."""
        columns = draft.columns(self._limits.window)
        drafted = self._add_drafts(draft, columns)
        starts: list[MemoryOp] = []
        # Waiting beams may start too.
        if columns.has_starts or len(draft) < len(self._running):
            starts = [seq.start for seq in self._running if seq.start is not None]
        conversions = self._regimes.conversions()
        for ops in ([*starts, *conversions], starts) if conversions else (starts,):
            if drafted is not None:
                answer = self._memory.plan(drafted.columns.growths, ops)
                if isinstance(answer, MemoryPlan):
                    return StepPlan.with_drafts(draft, drafted, answer)
            answer = self._memory.plan(columns.growths, ops)
            if isinstance(answer, MemoryPlan):
                return StepPlan.of(draft, columns, answer)
        assert isinstance(answer, Shortfall)
        return answer

    def _plan_beside_copies(
        self, draft: StepInProgress
    ) -> tuple[StepInProgress, StepPlan | Shortfall]:
        """Plan one step during swap copies; if that is not possible, wait for the copies and
        plan."""
        with self._memory.without_waiting():
            answer = self._plan_memory(draft)
            if isinstance(answer, StepPlan):
                return draft, answer
            others = self._copies.leave_out(draft)
            answer = self._plan_memory(others) if others else answer
            if isinstance(answer, StepPlan):
                return others, answer
        self._copies.finish()
        return draft, self._plan_memory(draft)

    def _share_budget(self) -> StepInProgress:
        granted = self._claims.granted
        if len(self._running) <= self._limits.max_num_batched_tokens and not granted:
            everybody = StepInProgress.one_token_each(self._running, self._limits.window)
            if everybody is not None:  # most steps: all decode
                return everybody
        budget = StepBudget.within(self._limits)
        decoding = [seq for seq in self._running if len(seq.tokens) - seq.num_computed == 1]
        draft = budget.take_next_tokens(decoding)
        prompts = [seq for seq in self._running if seq.num_uncomputed > 1]
        if not granted and self._shares is None:
            for sequence in prompts:
                if budget.can_take(sequence):
                    draft.append(budget.take(sequence))
            return draft
        # Keep tokens for sequences that are about to start.
        readers = sorted([*prompts, *granted], key=attrgetter("order"))
        parts = budget.divide(readers, by_tenant=self._shares is not None)
        for sequence, most in zip(readers, parts, strict=True):
            if sequence.status is not SequenceStatus.RUNNING:
                draft.kept[sequence] = most
            elif most and budget.can_take(sequence):
                draft.append(budget.take(sequence, most))
        return draft

    def _preempt_last(self) -> bool:
        """Preempt the last arrival, with its beams; False if nothing else would run."""
        if not self._running:
            return False
        victims = self._claims.victims_of_shortage()
        if len(victims) == len(self._running):
            return False
        self._preempt(victims)
        return True

    def _start_over(self) -> bool:
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
        self._preempt([sequence], may_swap=False)
        return True

    def _preempt(self, victims: list[Sequence], *, may_swap: bool = True) -> None:
        """Take the memory of one request's sequences; they come back later."""
        request = victims[0].request
        if not (may_swap and self._swap_out(victims)):
            for sequence in reversed(victims):
                if sequence.status is SequenceStatus.RUNNING:  # else it left with its parent
                    self._back_to_waiting(sequence)
        for sequence in victims:
            sequence.was_preempted = True
        request.metrics.num_preemptions += 1
        self.num_preemptions_total += 1
        logger.debug("preempted %d sequences of %s", len(victims), request.request_id)

    def _swap_out(self, victims: list[Sequence]) -> bool:
        """Swap the victims to host memory; returns whether they are there or on their way."""
        if any(seq.start is not None or seq.num_computed == 0 for seq in victims):
            return False  # nothing to copy yet, or not in memory
        sources = {seq.memory_id for seq in victims}
        if any(is_fork_of(seq, sources) for seq in self._running):
            return False
        num_blocks = sum(self._forecast.blocks(seq, seq.num_computed) for seq in victims)
        num_bytes = num_blocks * self._forecast.block_bytes
        if not self._preemption.swaps(sum(seq.num_computed for seq in victims), num_bytes):
            return False
        memory_ids = [seq.memory_id for seq in victims if seq.memory_id is not None]
        if not self._copies.swap_out(memory_ids, num_bytes):
            return False
        for sequence in victims:
            self._queues.leave(sequence)
            self._queues.swap(sequence)
        self.num_swaps_total += len(victims)
        return True

    # -- newcomers ----------------------------------------------------------------------

    def _plan_with_newcomers(
        self, draft: StepInProgress, newcomers: list[Sequence]
    ) -> StepPlan | None:
        """Plan with newcomers; those that do not fit after all wait again, last first.

        Using a cached prefix can cost one page more than computing it, because a page of which only
        a part is used is copied. So the last newcomer first tries without its prefix.
        """
        while draft and newcomers:
            answer = self._plan_memory(draft)
            if isinstance(answer, StepPlan):
                return answer
            self._last_shortfall = answer
            newcomer = newcomers[-1]
            if isinstance(newcomer.start, SwapIn):
                self._back_to_swapped(newcomers, draft)
            elif isinstance(newcomer.start, Attach):
                _start_with(newcomer, 0)
                self._grant_again(draft, [newcomer])
            else:
                draft.drop([newcomer])
                self._back_to_waiting(newcomers.pop())
        return self._plan_again(draft) if draft else None

    def _grant_again(self, draft: StepInProgress, sequences: list[Sequence]) -> None:
        """Grant these what they have to compute by now, from what the others leave."""
        draft.drop(sequences)
        budget = StepBudget.within(self._limits)
        budget.spend(draft)
        for sequence in sequences:
            if budget.can_take(sequence):
                draft.append(budget.take(sequence))

    def _back_to_swapped(self, newcomers: list[Sequence], draft: StepInProgress) -> None:
        """Leave the last newcomer, with the beams of its group, in host memory."""
        group = with_its_gang(newcomers[-1], newcomers)
        for sequence in group:
            newcomers.remove(sequence)
            self._queues.leave(sequence)
            sequence.start = None
            self._queues.swap(sequence)
        draft.drop(group)

    # -- back to where they came from ---------------------------------------------------

    def _back_to_waiting(self, sequence: Sequence) -> None:
        """Return the sequence to the waiting ones, with those that were to fork from it."""
        self._queues.leave(sequence)
        self._regimes.forget(sequence)
        memory_id = sequence.memory_id
        self._release_and_requeue(sequence)
        self._send_back_forks({memory_id})

    def _drop_donors(self) -> None:
        self._send_back_forks({donor.memory_id for donor in self._donors.sequences()})
        self._donors.drop_all()

    def _send_back_forks(self, sources: set[int | None]) -> None:
        """Return sequences to the waiting ones that the next plan would fork from ``sources``."""
        for child in list(self._running):
            # One that was another pending fork's child has left already.
            if child.status is SequenceStatus.RUNNING and is_fork_of(child, sources):
                self._back_to_waiting(child)

    def _release_and_requeue(self, sequence: Sequence) -> None:
        """Release its memory, and wait for another start."""
        release_memory(self._memory, sequence)
        sequence.num_computed = 0
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Let it wait, or follow a sibling that computes the prompt."""
        # One sequence of a request computes the prompt; the others follow.
        if any(
            computes_prompt(other) for other in sequence.request.sequences if other is not sequence
        ):
            self._followers.add(sequence)
        else:
            self._queues.wait(sequence)

    def _recheck_starts(self) -> list[Sequence]:
        """Let sequences that have not started yet start with what is still cached of their
        prefixes; returns those that have lost some."""
        lost = []
        for sequence in self._running:
            if not isinstance(start := sequence.start, Attach):
                continue
            if (hit := self._memory.match(start.seq)) < start.num_tokens:
                _start_with(sequence, hit)
                lost.append(sequence)
        return lost

    def _give_up_prefixes(self) -> list[Sequence]:
        """Let all that have not started yet start without cached prefixes; returns them."""
        starting = [seq for seq in self._running if isinstance(seq.start, Attach)]
        for sequence in starting:
            _start_with(sequence, 0)
        return starting


def _start_with(sequence: Sequence, num_cached: int) -> None:
    """Let a sequence that was to start with a cached prefix start with so many tokens of it."""
    start = sequence.start
    assert isinstance(start, Attach)
    sequence.start = Attach(start.seq, num_cached) if num_cached else None
    sequence.num_computed = num_cached
    if sequence.num_output == 0:
        sequence.request.metrics.num_cached_tokens = num_cached


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
