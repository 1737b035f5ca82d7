"""First come, first served, under a token budget, with chunked prefill.

Each step spends ``max_num_batched_tokens``: first one token for every sequence that
decodes (so that a long prompt never stalls those already producing text), then
chunks of the prompts that are being read, in order of arrival, then admissions.

A sequence is admitted only when all of its known tokens fit beside what the running
ones are still promised, so that prompts are never preempted half-read by a newcomer.
When decoding outgrows the pool, the sequence that arrived last gives its pages back: it
computes its tokens again later, or is swapped to host memory (SOSP'23 PagedAttention
§4.5), whichever :mod:`vmserve.scheduler.preemption` says. Beams of one request go together,
as they wait for each other. Whoever was swapped comes back before anybody is admitted.

The sequences of one request share its prompt: the first computes it, the others *follow*
(they are in no queue) and start as forks of it, now and after each preemption.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
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
from vmserve.scheduler.base import NoRoomError, StepDraft, StepPlan
from vmserve.scheduler.budget import StepBudget
from vmserve.scheduler.copies import CopiesOut
from vmserve.scheduler.demand import BlockDemand
from vmserve.scheduler.fairness import TenantShares
from vmserve.scheduler.followers import Followers
from vmserve.scheduler.preemption import PreemptionPolicy
from vmserve.scheduler.regime import RegimeChoice, RegimePolicy
from vmserve.scheduler.regime_keeper import RegimeKeeper
from vmserve.scheduler.sequence import Request, Sequence, SequenceStatus
from vmserve.scheduler.siblings import has_followers, is_fork_of, leads, with_its_gang

__all__ = ["FCFSScheduler", "SchedulerLimits"]

logger = logging.getLogger(__name__)

_ORDER = attrgetter("order")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    #: Share of the pool that admission leaves free while something runs, as room to decode.
    watermark: float = 0.01
    #: The widest sliding window of the model's layers; None if a layer sees everything.
    window: int | None = None
    #: Prompt tokens that a step scores at most: each takes a row of logits.
    max_scored_tokens: int = 1 << 20
    #: A step reads prompts or decodes, never both, as in the paper (the policy "v0").
    separates_phases: bool = False
    #: Then prompts wait for so many times as long as the last ones took, to be read together.
    delay_factor: float = 0.0


class FCFSScheduler:
    """See the module's text. Not thread-safe: the engine's thread owns it."""

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
        self._demand = BlockDemand(memory.layout)
        self._preemption = preemption or PreemptionPolicy("recompute")
        self._copies = CopiesOut(memory, self._demand, self._preemption)
        self._shares = shares
        self._clock = clock
        #: How long the last step of prompts alone took, and when it began, if it runs.
        self._prompts_took = 0.0
        self._prompts_began: float | None = None
        # All in the order in which sequences are served.
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._swapped: list[Sequence] = []
        self._followers = Followers()
        self._regimes = RegimeKeeper(
            regimes or RegimePolicy("virtual"), memory, self._running, self._waiting
        )
        #: Finished sequences whose memory is kept for those that have yet to fork from it.
        self._donors: dict[str, Sequence] = {}
        #: The system refused memory that the limit promises: nobody is admitted beside those
        #: that run until one of them has ended, or the same refusal would come each step.
        self._is_short = False
        #: A step was planned and not applied.
        self._is_pending = False
        self.num_preemptions_total = 0
        self.num_swaps_total = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running_request_ids(self) -> list[str]:
        return list(dict.fromkeys(sequence.request.request_id for sequence in self._running))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._followers) + len(self._swapped)

    # -- requests -----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue the request: its first sequence, which the others follow."""
        if self._shares is not None:
            self._shares.arrived(request)
        first, *others = request.sequences
        self._enqueue(first)
        for sequence in others:
            self._followers.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._is_short = False
        elif sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        elif sequence.status is SequenceStatus.SWAPPED:
            self._swapped.remove(sequence)
        elif sequence.status is SequenceStatus.FOLLOWING:
            self._followers.remove(sequence)
        self._regimes.forget(sequence)
        was_swapped = sequence.status is SequenceStatus.SWAPPED
        sequence.status = SequenceStatus.FINISHED
        request = sequence.request
        if sequence.memory_id is not None:
            if not was_swapped and self._is_wanted(sequence):
                self._donors[request.request_id] = sequence
            else:
                self._release(sequence)
        self._followers.lost_one(request)
        if not has_followers(request):
            self._drop_donor(request)
        if self._shares is not None and request.finished:
            self._shares.left(request)

    def abort(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.status is not SequenceStatus.FINISHED:
                self.finish(sequence)
        self._drop_donor(request)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        assert parent.memory_id is not None
        self._regimes.inherit(parent, child)
        request = child.request
        memory_id = self._memory.open(
            regime=child.regime, tenant=request.memory_tenant, salt=request.cache_salt
        )
        assert memory_id is not None, "the beams that were outdone are dropped before the forks"
        child.memory_id = memory_id
        child.start = Fork(memory_id, parent.memory_id, parent.num_computed)
        child.num_computed = child.num_named = parent.num_computed
        child.status = SequenceStatus.RUNNING
        insort(self._running, child, key=_ORDER)

    def convert(self, request: Request, regime: Regime, reason: str = "converted") -> None:
        self._regimes.convert(request, regime, reason)

    # -- the step -----------------------------------------------------------------------

    def applied(self, plan: StepPlan) -> None:
        self._is_pending = False
        if plan.memory.ops:
            self._started(plan.memory.ops)
        if self._donors:
            for donor in [seq for seq in self._donors.values() if not has_followers(seq.request)]:
                self._drop_donor(donor.request)

    def _started(self, ops: tuple[MemoryOp, ...]) -> None:
        for sequence in self._running:
            sequence.start = None
        self._regimes.converted(ops)

    def computed(self, plan: StepPlan) -> None:
        ends = (plan.num_past + plan.num_new).tolist()
        for sequence, num_computed in zip(plan.sequences, ends, strict=True):
            sequence.num_computed = num_computed
        if self._shares is not None:
            for sequence, samples in zip(plan.sequences, plan.samples.tolist(), strict=True):
                if samples:
                    self._shares.served(sequence.request, num_generated=1)

    def schedule(self, *, ahead: bool = False) -> StepPlan | None:
        self._regimes.reconsider()
        if ahead:
            return self._schedule_ahead()
        if self._prompts_began is not None:
            self._prompts_took = self._clock() - self._prompts_began
            self._prompts_began = None
        plan = self._schedule()
        while plan is None and self._give_way():
            plan = self._schedule()
        return plan

    def _schedule_ahead(self) -> StepPlan | None:
        """Those that run, as far as there is room, and newcomers beside them."""
        self._begin()
        draft = self._share_budget()
        plan = self._plan_memory(draft)
        if not isinstance(plan, StepPlan):
            return None
        return self._with_admitted(draft, plan)

    def _begin(self) -> None:
        for sequence in self._followers.take_ready(self._running, self._donors.values()):
            self._enqueue(sequence)
        if self._is_pending:
            self._renew_starts()
        self._is_pending = True

    def _schedule(self) -> StepPlan | None:
        self._begin()
        if self._limits.separates_phases and (prompts := self._schedule_prompts()) is not None:
            return prompts
        preempted_before = self.num_preemptions_total
        draft, plan = self._schedule_running()
        # Beside beams that only wait, whoever was preempted just now may be the one to go on.
        if self.num_preemptions_total == preempted_before or not draft:
            # Where nobody decodes after all, prompts may be read in this step, too.
            mixes = not self._limits.separates_phases or len(draft) == 0
            plan = self._with_admitted(draft, plan, prompts=mixes)
        return plan if draft else None

    def _with_admitted(
        self, draft: StepDraft, plan: StepPlan | None, *, prompts: bool = True
    ) -> StepPlan | None:
        """``plan`` is the draft's so far; None for no step."""
        newcomers = self._admit(draft, prompts=prompts)
        if newcomers:
            plan = self._plan_with_newcomers(draft, newcomers)
        return plan if draft else None

    def _give_way(self) -> bool:
        """Nobody can compute: give up what stands in the way, if anything; False if all is done.

        Each time less is kept or less runs, so that this ends: with a step, or with an error for
        the request for which there is no memory even alone.
        """
        if self._is_short:
            self._is_short = False
            return True
        if self._donors:
            self._drop_donors()
            return True
        gangs = list(dict.fromkeys(sequence.request for sequence in self._running))
        if gangs:
            # All of them wait for beams of theirs, for which there is no room beside the others.
            if len(gangs) > 1 or self._somebody_else_waits(gangs[0]):
                victims = [seq for seq in self._running if seq.request is gangs[-1]]
                self._preempt(victims, may_swap=False)  # swapped it would be the first to come back
                return True
            raise NoRoomError(gangs[0].request_id, self._no_room("the beams of a request"))
        if self._swapped:
            # Swapping shares nothing: together they do not fit, computed again they may.
            for sequence in list(self._swapped):
                self._swapped.remove(sequence)
                self._give_up(sequence)
            return True
        if self._waiting:
            request_id = self._next_waiting().request.request_id
            raise NoRoomError(request_id, self._no_room("the next request"))
        return False

    def _somebody_else_waits(self, gang: Request) -> bool:
        """Before ``gang`` in the order: what holds up its beams."""
        first = [*self._swapped[:1], *([self._next_waiting()] if self._waiting else [])]
        return any(seq.request is not gang for seq in first)

    def _no_room(self, who: str) -> str:
        return (
            f"{who} needs more than the {self._memory.available_pages()} pages of the KV cache "
            f"that can be had, of {self._memory.limit_pages}: raise --kv-cache-memory, unpin "
            "prefixes, or lower the beam width"
        )

    def make_room(self) -> bool:
        if self._regimes.give_up():
            return True
        if self._donors:
            self._drop_donors()
            return True
        self._is_short = self._preempt_last()
        return self._is_short

    # -- those that run -----------------------------------------------------------------

    def _schedule_running(self) -> tuple[StepDraft, StepPlan | None]:
        """Decodes, then prompt chunks; preempts from the back until it fits."""
        while self._running:
            draft = self._share_budget()
            if self._memory.is_copying:
                draft, answer = self._plan_beside_copies(draft)
            else:
                answer = self._plan_memory(draft)
            if isinstance(answer, StepPlan):
                return draft, answer
            if self._donors:
                self._drop_donors()
            elif not (self._preempt_last() or self._start_over()):
                # The engine checks at start that the pool holds the longest sequence, so either
                # several beams share it, or pages are missing that the system does not take back.
                raise NoRoomError(
                    self._running[0].request.request_id,
                    f"a request that runs alone needs {answer.needed_pages} pages of the KV cache "
                    f"and {answer.available_pages} can be had: raise --kv-cache-memory, or lower "
                    "the beam width or --max-model-len",
                )
        return StepDraft(), None

    def _plan_memory(self, draft: StepDraft) -> StepPlan | Shortfall:
        """With the conversions that were asked for, unless there is no memory for them now."""
        columns = draft.columns(self._limits.window)
        growths = columns.growths
        starts: list[MemoryOp] = []
        # Beams that only wait may start, too.
        if columns.has_starts or len(draft) < len(self._running):
            starts = [seq.start for seq in self._running if seq.start is not None]
        answer: MemoryPlan | Shortfall | None = None
        conversions = self._regimes.conversions()
        if conversions:
            answer = self._memory.plan(growths, [*starts, *conversions])
        if not isinstance(answer, MemoryPlan):
            answer = self._memory.plan(growths, starts)
        if isinstance(answer, Shortfall):
            return answer
        return StepPlan.of(draft, columns, answer)

    def _plan_beside_copies(self, draft: StepDraft) -> tuple[StepDraft, StepPlan | Shortfall]:
        """A step beside the copies of who was swapped out, once; else one that waits for them."""
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

    def _share_budget(self) -> StepDraft:
        if len(self._running) <= self._limits.max_num_batched_tokens:
            everybody = StepDraft.of_everybody(self._running, self._limits.window)
            if everybody is not None:  # most steps: all decode
                return everybody
        budget = self._new_budget()
        decoding = [seq for seq in self._running if len(seq.tokens) - seq.num_computed == 1]
        plan = budget.take_next_tokens(decoding)
        separate = self._limits.separates_phases and decoding
        if separate or len(decoding) == len(self._running):
            return plan
        for sequence in self._running:
            if sequence.num_uncomputed > 1 and budget.can_take(sequence):
                plan.append(budget.take(sequence))
        return plan

    def _schedule_prompts(self) -> StepPlan | None:
        """Prompts alone, those of newcomers too; nothing while anybody is in host memory."""
        if self._swapped or not self._may_read_prompts():
            return None
        draft = StepDraft()
        budget = self._new_budget()
        for sequence in self._running:
            # The last token of a prompt, too, that a budget cut off before it.
            reads = sequence.num_uncomputed > 1 or sequence.num_computed < sequence.num_prompt
            if reads and budget.can_take(sequence):
                draft.append(budget.take(sequence))
        plan = self._plan_memory(draft)
        if not isinstance(plan, StepPlan):
            return None  # decodes go on, or make room
        newcomers = self._admit(draft)
        with_newcomers = self._plan_with_newcomers(draft, newcomers) if newcomers else plan
        if not draft:
            return None
        self._prompts_began = self._clock()
        return with_newcomers

    def _may_read_prompts(self) -> bool:
        """Whether the first of the queue has waited for long enough, or holds nobody up."""
        factor = self._limits.delay_factor
        if not factor or not self._waiting or not self._running:
            return True
        waited = self._clock() - self._next_waiting().request.metrics.arrival_time
        return waited > factor * self._prompts_took

    def _new_budget(self) -> StepBudget:
        return StepBudget(self._limits.max_num_batched_tokens, self._limits.max_scored_tokens)

    def _preempt_last(self) -> bool:
        """Everything that runs of the request that arrived last, if beams; else one sequence.

        False if nobody else would run.
        """
        if not self._running:
            return False
        victims = with_its_gang(self._running[-1], self._running)
        if len(victims) == len(self._running):
            return False
        self._preempt(victims)
        return True

    def _start_over(self) -> bool:
        """Who runs alone and began with others' blocks gives them up, once; False if it cannot.

        It may hold pages of which it uses a block, and which a parked slot keeps from being
        packed; computed from nothing it has whole pages.
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
        """Sequences of one request give their memory back, and come back later."""
        request = victims[0].request
        if not (may_swap and self._swap_out(victims)):
            for sequence in reversed(victims):
                if sequence.status is SequenceStatus.RUNNING:  # else it went with its parent
                    self._back_to_waiting(sequence)
        for sequence in victims:
            sequence.was_preempted = True
        request.metrics.num_preemptions += 1
        self.num_preemptions_total += 1
        logger.debug("preempted %d sequences of %s", len(victims), request.request_id)

    def _swap_out(self, victims: list[Sequence]) -> bool:
        """Whether the victims' keys and values are in host memory now, or on their way there."""
        if any(seq.start is not None or seq.num_computed == 0 for seq in victims):
            return False  # nothing to copy yet, or not in memory
        sources = {seq.memory_id for seq in victims}
        if any(is_fork_of(seq, sources) for seq in self._running):
            return False
        num_blocks = sum(self._demand.blocks(seq, seq.num_computed) for seq in victims)
        num_bytes = num_blocks * self._demand.block_bytes
        if not self._preemption.swaps(sum(seq.num_computed for seq in victims), num_bytes):
            return False
        memory_ids = [seq.memory_id for seq in victims if seq.memory_id is not None]
        if not self._copies.swap_out(memory_ids, num_bytes):
            return False
        for sequence in victims:
            self._running.remove(sequence)
            sequence.status = SequenceStatus.SWAPPED
            insort(self._swapped, sequence, key=_ORDER)
        self.num_swaps_total += len(victims)
        return True

    # -- newcomers ----------------------------------------------------------------------

    def _admit(self, plan: StepDraft, *, prompts: bool = True) -> list[Sequence]:
        """Add newcomers to ``plan`` while budget, sequences and memory last; who they are.

        Without ``prompts`` only those who were swapped out come back.
        """
        if not (self._waiting or self._swapped) or (self._is_short and self._running):
            return []
        budget = self._new_budget()
        budget.spend(plan)
        # What a newcomer may take, once every running sequence has what it is owed.
        blocks_per_page = self._demand.blocks_per_page
        room = self._memory.available_pages() * blocks_per_page - sum(
            self._demand.owed(seq) for seq in self._running
        )
        watermark = int(self._limits.watermark * self._memory.limit_pages) * blocks_per_page
        newcomers = self._swap_in(plan, budget, room)
        if self._swapped or not prompts:
            return newcomers  # who was swapped comes back first
        room -= sum(self._demand.next_token(seq) for seq in newcomers)
        while self._waiting:
            sequence = self._next_waiting()
            request = sequence.request
            if not budget.can_take(sequence):
                break
            if self._num_reserved(request) > self._limits.max_num_seqs:
                break
            # Those that run may wait for this very one: then there is no room to leave.
            gang = request if request.is_gang else None
            alone = all(other.request is gang for other in self._running)
            choice = self._regimes.choose(request)
            sequence.regime = choice.regime
            donor = self._donor_for(sequence)
            shared = sequence.num_prompt if donor else 0
            blocks = self._demand.next_token(sequence) - self._demand.shared(sequence, shared)
            reserve = 0 if alone else watermark
            if sequence.was_preempted and not alone:
                reserve = max(reserve, self._headroom([sequence]))
            if blocks + reserve > room:
                break
            if not self._open(sequence, donor, choice):
                break
            self._waiting.remove(sequence)
            sequence.status = SequenceStatus.RUNNING
            insort(self._running, sequence, key=_ORDER)
            newcomers.append(sequence)
            room -= blocks
            plan.append(budget.take(sequence))
        return newcomers

    def _next_waiting(self) -> Sequence:
        """In order; with fair sharing whoever was preempted, then the tenant whose turn it is."""
        if self._shares is None:
            return self._waiting[0]
        preempted = (seq for seq in self._waiting if seq.was_preempted)
        return next(preempted, None) or self._shares.next_of(self._waiting)

    def _swap_in(self, plan: StepDraft, budget: StepBudget, room: int) -> list[Sequence]:
        """Add the swapped ones to ``plan`` that fit, whole groups of beams; who they are."""
        back: list[Sequence] = []
        while self._swapped and budget.tokens > 0:
            first = self._swapped[0]
            group = with_its_gang(first, self._swapped)
            blocks = sum(self._demand.next_token(seq) for seq in group)
            alone = not self._running
            reserve = 0 if alone else self._headroom(group)
            num_after = self._num_reserved(first.request)
            if blocks + reserve > room or num_after > self._limits.max_num_seqs:
                break
            room -= blocks
            for sequence in group:
                assert sequence.memory_id is not None
                self._swapped.remove(sequence)
                sequence.start = SwapIn(sequence.memory_id)
                sequence.status = SequenceStatus.RUNNING
                insort(self._running, sequence, key=_ORDER)
                back.append(sequence)
                if budget.can_take(sequence) and sequence.num_uncomputed:
                    plan.append(budget.take(sequence))
        return back

    def _headroom(self, newcomers: list[Sequence]) -> int:
        """Blocks that must be left when these come back.

        Else they would be the victims again after a few steps, and all the copying, or computing,
        would have been for nothing.
        """
        return sum(self._demand.ahead(seq) for seq in (*self._running, *newcomers))

    def _num_reserved(self, newcomer: Request) -> int:
        """Sequences that run or can come to, with one more of ``newcomer``: beams fork at will."""
        gangs = {seq.request for seq in self._running if seq.request.is_gang}
        if newcomer.is_gang:
            gangs.add(newcomer)
        others = sum(not seq.request.is_gang for seq in self._running)
        return others + (not newcomer.is_gang) + sum(gang.num_branches for gang in gangs)

    def _plan_with_newcomers(self, plan: StepDraft, newcomers: list[Sequence]) -> StepPlan | None:
        """Newcomers that do not fit after all (a slot is short, say) wait again, last first.

        Taking a prefix from the cache can cost a page more than computing it: a page of which
        only a part is wanted is copied. The last newcomer then starts from nothing.
        """
        while plan:
            answer = self._plan_memory(plan)
            if isinstance(answer, StepPlan):
                return answer
            newcomer = newcomers[-1]
            if isinstance(newcomer.start, SwapIn):
                self._back_to_swapped(newcomers, plan)
                continue
            assert plan.pop()[0] is newcomer
            if not isinstance(newcomer.start, Attach):
                self._back_to_waiting(newcomers.pop())
                continue
            newcomer.start = None
            newcomer.num_computed = 0
            newcomer.request.metrics.num_cached_tokens = 0
            budget = self._new_budget()
            budget.spend(plan)
            plan.append(budget.take(newcomer))
        return None

    def _open(self, sequence: Sequence, donor: Sequence | None, choice: RegimeChoice) -> bool:
        """The sequence's place in memory, and what it starts with; False if there is none.

        ``choice``: its request's regime, which is kept from now on. A new request's is chosen once
        more where its prompt turns out to be cached.
        """
        request = sequence.request
        known = () if donor is not None else sequence.tokens
        memory_id = self._memory.open(
            known,
            regime=sequence.regime,
            tenant=request.memory_tenant,
            salt=request.cache_salt,
        )
        if memory_id is None:
            return False
        sequence.memory_id = memory_id
        sequence.borrowed = donor is not None
        if donor is not None:
            assert donor.memory_id is not None
            sequence.start = Fork(memory_id, donor.memory_id, sequence.num_prompt)
            sequence.num_computed = sequence.num_named = sequence.num_prompt
            self._regimes.keep(request, choice)
            return True
        sequence.num_named = len(known)
        # Whoever asks for the prompt's log-probabilities needs its logits computed.
        wants_logits = request.params.prompt_logprobs is not None
        looks = not (wants_logits or sequence.starts_over)
        hit = self._memory.match(memory_id) if looks else 0
        if hit and self._regimes.predicts:
            choice = self._regimes.choose(request, hit)
            if choice.regime is not sequence.regime:
                memory_id = self._reopen(sequence, memory_id, choice.regime)
        self._regimes.keep(request, choice)
        sequence.borrowed = hit > 0
        sequence.start = Attach(memory_id, hit) if hit else None
        sequence.num_computed = hit
        if sequence.num_output == 0:
            request.metrics.num_cached_tokens = hit
            if self._shares is not None and not sequence.was_preempted:
                self._shares.served(request, num_read=sequence.num_prompt - hit)
        return True

    def _reopen(self, sequence: Sequence, memory_id: int, regime: Regime) -> int:
        """In the other regime, which is the better one with a cached prefix."""
        self._memory.release(memory_id)
        request = sequence.request
        reopened = self._memory.open(
            sequence.tokens, regime=regime, tenant=request.memory_tenant, salt=request.cache_salt
        )
        assert reopened is not None, "one was closed just now"
        sequence.regime = regime
        sequence.memory_id = reopened
        return reopened

    # -- forks of one prompt ------------------------------------------------------------

    def _donor_for(self, sequence: Sequence) -> Sequence | None:
        """A sibling, in whichever regime, whose memory begins with the prompt of ``sequence``."""
        request = sequence.request
        if request.num_branches == 1:
            return None
        kept = self._donors.get(request.request_id)
        for other in (*request.sequences, kept):
            if other is None or other is sequence or not other.has_prompt:
                continue
            if self._keeps_prompt(other):
                return other
        return None

    def _keeps_prompt(self, sequence: Sequence) -> bool:
        """Not where the sliding window has moved past what a fork at the prompt's end sees."""
        window = self._limits.window
        return window is None or sequence.num_computed <= max(window, sequence.num_prompt)

    def _is_wanted(self, sequence: Sequence) -> bool:
        """Whether siblings have yet to fork from this sequence, which has finished."""
        request = sequence.request
        return (
            sequence.has_prompt
            and request.request_id not in self._donors
            and has_followers(request)
            and not any(other.has_prompt for other in request.sequences if other is not sequence)
        )

    def _drop_donor(self, request: Request) -> None:
        donor = self._donors.pop(request.request_id, None)
        if donor is not None:
            self._release(donor)

    def _drop_donors(self) -> None:
        self._send_back_forks({donor.memory_id for donor in self._donors.values()})
        for donor in self._donors.values():
            self._release(donor)
        self._donors.clear()

    def _back_to_swapped(self, newcomers: list[Sequence], plan: StepDraft) -> None:
        """The last newcomer, with the beams of its group, stays in host memory after all."""
        group = with_its_gang(newcomers[-1], newcomers)
        for sequence in group:
            newcomers.remove(sequence)
            self._running.remove(sequence)
            sequence.start = None
            sequence.status = SequenceStatus.SWAPPED
            insort(self._swapped, sequence, key=_ORDER)
        plan.drop(group)

    # -- queues -------------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        insort(self._waiting, sequence, key=_ORDER)

    def _back_to_waiting(self, sequence: Sequence) -> None:
        """Also whoever was to fork from it, in a step that has not been."""
        self._running.remove(sequence)
        self._regimes.forget(sequence)
        memory_id = sequence.memory_id
        self._give_up(sequence)
        self._send_back_forks({memory_id})

    def _send_back_forks(self, sources: set[int | None]) -> None:
        """Whoever is to start as a fork of these, in the next plan, waits again."""
        for child in list(self._running):
            # One that went with another fork on the way has left already.
            if child.status is SequenceStatus.RUNNING and is_fork_of(child, sources):
                self._back_to_waiting(child)

    def _give_up(self, sequence: Sequence) -> None:
        """Its keys and values are gone: it waits, or follows a sibling that computes the prompt."""
        self._release(sequence)
        sequence.num_computed = 0
        # One sequence of a request computes the prompt, the others follow.
        if any(leads(other) for other in sequence.request.sequences if other is not sequence):
            self._followers.add(sequence)
        else:
            self._enqueue(sequence)

    def _renew_starts(self) -> None:
        """A step that was planned but never applied leaves starts: cached prefixes may be gone."""
        for sequence in self._running:
            start = sequence.start
            if isinstance(start, Attach):
                hit = min(start.num_tokens, self._memory.match(start.seq))
                sequence.start = Attach(start.seq, hit) if hit else None
                sequence.num_computed = hit

    def _release(self, sequence: Sequence) -> None:
        assert sequence.memory_id is not None
        self._memory.release(sequence.memory_id)
        sequence.memory_id = sequence.start = None
