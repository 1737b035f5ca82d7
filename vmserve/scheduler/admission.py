"""Who may begin in a step, and with what: newcomers, and those who come back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vmserve.memory.base import Attach, Fork, KVMemory, Regime, SwapIn
from vmserve.scheduler.base import StepDraft
from vmserve.scheduler.budget import SchedulerLimits, StepBudget
from vmserve.scheduler.siblings import with_its_gang

if TYPE_CHECKING:
    from vmserve.scheduler.demand import BlockDemand
    from vmserve.scheduler.donors import Donors
    from vmserve.scheduler.fairness import TenantShares
    from vmserve.scheduler.queues import Queues
    from vmserve.scheduler.regime import RegimeChoice
    from vmserve.scheduler.regime_keeper import RegimeKeeper
    from vmserve.scheduler.sequence import Request, Sequence

__all__ = ["Admission"]


class Admission:
    """Nobody begins for whom there may be no memory: all known tokens must fit beside what those
    that run are still promised."""

    def __init__(
        self,
        memory: KVMemory,
        limits: SchedulerLimits,
        demand: BlockDemand,
        queues: Queues,
        donors: Donors,
        regimes: RegimeKeeper,
        shares: TenantShares | None,
    ) -> None:
        self._memory = memory
        self._limits = limits
        self._demand = demand
        self._queues = queues
        self._donors = donors
        self._regimes = regimes
        self._shares = shares

    def admit(
        self, plan: StepDraft, *, prompts: bool = True, is_short: bool = False
    ) -> list[Sequence]:
        """Add newcomers to ``plan`` while budget, sequences and memory last; who they are.

        Without ``prompts`` only those who were swapped out come back; with ``is_short`` nobody
        does, beside those that run.
        """
        if not (self._queues.waiting or self._queues.swapped) or (
            is_short and self._queues.running
        ):
            return []
        budget = StepBudget.within(self._limits)
        budget.spend(plan)
        # What a newcomer may take, once every running sequence has what it is owed.
        blocks_per_page = self._demand.blocks_per_page
        room = self._memory.available_pages() * blocks_per_page - sum(
            self._demand.owed(seq) for seq in self._queues.running
        )
        watermark = int(self._limits.watermark * self._memory.limit_pages) * blocks_per_page
        newcomers = self._swap_in(plan, budget, room)
        if self._queues.swapped or not prompts:
            return newcomers  # who was swapped comes back first
        room -= sum(self._demand.next_token(seq) for seq in newcomers)
        while self._queues.waiting:
            sequence = self.next_waiting()
            request = sequence.request
            if not budget.can_take(sequence):
                break
            if self._num_reserved(request) > self._limits.max_num_seqs:
                break
            # Those that run may wait for this very one: then there is no room to leave.
            gang = request if request.is_gang else None
            alone = all(other.request is gang for other in self._queues.running)
            donor = self._donors.find(sequence)
            shared = sequence.num_prompt if donor else 0
            reserve = 0 if alone else watermark
            if self._demand.at_least(sequence, shared) + reserve > room:
                break  # in either regime: whoever waits for memory need not choose at every step
            choice = self._regimes.choose(request)
            sequence.regime = choice.regime
            blocks = self._demand.next_token(sequence) - self._demand.shared(sequence, shared)
            if sequence.was_preempted and not alone:
                reserve = max(reserve, self._headroom([sequence]))
            if blocks + reserve > room:
                break
            if not self._open(sequence, donor, choice):
                break
            self._queues.leave(sequence)
            self._queues.run(sequence)
            newcomers.append(sequence)
            room -= blocks
            plan.append(budget.take(sequence))
        return newcomers

    def next_waiting(self) -> Sequence:
        """In order; with fair sharing whoever was preempted, then the tenant whose turn it is."""
        if self._shares is None:
            return self._queues.waiting[0]
        preempted = (seq for seq in self._queues.waiting if seq.was_preempted)
        return next(preempted, None) or self._shares.next_of(self._queues.waiting)

    def _swap_in(self, plan: StepDraft, budget: StepBudget, room: int) -> list[Sequence]:
        """Add the swapped ones to ``plan`` that fit, whole groups of beams; who they are."""
        back: list[Sequence] = []
        while self._queues.swapped and budget.tokens > 0:
            first = self._queues.swapped[0]
            group = with_its_gang(first, self._queues.swapped)
            blocks = sum(self._demand.next_token(seq) for seq in group)
            alone = not self._queues.running
            reserve = 0 if alone else self._headroom(group)
            num_after = self._num_reserved(first.request)
            if blocks + reserve > room or num_after > self._limits.max_num_seqs:
                break
            room -= blocks
            for sequence in group:
                assert sequence.memory_id is not None
                self._queues.leave(sequence)
                sequence.start = SwapIn(sequence.memory_id)
                self._queues.run(sequence)
                back.append(sequence)
                if budget.can_take(sequence) and sequence.num_uncomputed:
                    plan.append(budget.take(sequence))
        return back

    def _headroom(self, newcomers: list[Sequence]) -> int:
        """Blocks that must be left when these come back.

        Else they would be the victims again after a few steps, and all the copying, or computing,
        would have been for nothing.
        """
        return self._demand.headroom([*self._queues.running, *newcomers], self._regimes.mean_output)

    def _num_reserved(self, newcomer: Request) -> int:
        """Sequences that run or can come to, with one more of ``newcomer``: beams fork at will."""
        gangs = {seq.request for seq in self._queues.running if seq.request.is_gang}
        if newcomer.is_gang:
            gangs.add(newcomer)
        others = sum(not seq.request.is_gang for seq in self._queues.running)
        return others + (not newcomer.is_gang) + sum(gang.num_branches for gang in gangs)

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
        # Log-probabilities of the prompt, and the mean of its states, need all of it computed.
        looks = not (request.params.reads_whole_prompt or sequence.starts_over)
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
