"""Decide which waiting and swapped sequences start in a step, and from what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vmserve.memory.base import Attach, Fork, KVMemory, Regime, SwapIn
from vmserve.scheduler.base import StepInProgress
from vmserve.scheduler.budget import SchedulerLimits, StepBudget
from vmserve.scheduler.rooms import Rooms, RoomsAlone, open_memory, release_memory
from vmserve.scheduler.sequence import SequenceStatus, num_places, with_its_gang

if TYPE_CHECKING:
    from vmserve.scheduler.claims import Claims
    from vmserve.scheduler.fairness import OneTenant, TenantShares
    from vmserve.scheduler.families import Families
    from vmserve.scheduler.order import Order
    from vmserve.scheduler.regime import RegimeChoice
    from vmserve.scheduler.regime_keeper import RegimeKeeper
    from vmserve.scheduler.sequence import Sequence

__all__ = ["Admission"]

#: Steps of others that a sequence lets pass while blocks of its prefix are read. Then all wait.
MOST_RESTORING_STEPS = 8
#: Choices of requests that are admitted in a step, unless more sequences may run or one request has
#: more.
_MOST_BRANCHES = 128


@dataclass(slots=True)
class _Opening:
    """What a step has left for newcomers: ``budget`` in tokens, ``room`` in blocks."""

    step: StepInProgress
    budget: StepBudget
    room: int
    #: Blocks that stay free while something runs.
    watermark: int
    newcomers: list[Sequence] = field(default_factory=list)
    #: Choices of the newcomers; those of a request draw their first token in the same step.
    num_branches: int = 0


class Admission:
    """Admit a sequence only if all its known tokens fit besides what running sequences may still
    need."""

    def __init__(
        self,
        memory: KVMemory,
        limits: SchedulerLimits,
        order: Order,
        families: Families,
        rooms: Rooms,
        regimes: RegimeKeeper,
        claims: Claims,
        shares: TenantShares | OneTenant,
    ) -> None:
        self._memory = memory
        self._limits = limits
        self._order = order
        self._families = families
        self._rooms_with_others = rooms
        self._rooms_alone = RoomsAlone(memory, limits)
        self._regimes = regimes
        self._claims = claims
        self._shares = shares
        #: Whether the last call of :meth:`admit` left a sequence waiting for its stored prefix.
        self.has_deferred = False
        #: Sequence that is being started; it stays after an exception.
        self.starting: Sequence | None = None

    @property
    def _rooms(self) -> Rooms:
        return self._rooms_with_others if self._order.running else self._rooms_alone

    def admit(self, step: StepInProgress, *, admission_paused: bool = False) -> list[Sequence]:
        """Add newcomers to ``step`` while budget, places and memory last; returns them.

        With ``admission_paused``, nothing is admitted unless nothing runs.
        """
        self.has_deferred = False
        order = self._order
        if not (order.waiting or order.swapped) or (admission_paused and order.running):
            return []
        budget = StepBudget.within(self._limits)
        budget.spend(step)
        rooms = self._rooms
        opening = _Opening(step, budget, rooms.left(order.running), rooms.watermark)
        for sequence in self._claimants(step):
            is_swapped = sequence.status is SequenceStatus.SWAPPED
            if not (self._swap_in if is_swapped else self._begin)(sequence, opening):
                return opening.newcomers  # those after it wait too
        while order.swapped and self._swap_in(order.swapped[0], opening):
            pass
        if order.swapped:
            return opening.newcomers  # swapped sequences come back first
        while order.waiting and self._begin(self.next_waiting(step), opening):
            pass
        return opening.newcomers

    def next_waiting(self, step: StepInProgress | None = None) -> Sequence:
        """The next waiting sequence: the first with a granted claim, else of the tenant whose turn
        it is, the grants of ``step`` counted."""
        step = StepInProgress() if step is None else step
        for sequence in self._claimants(step):
            if sequence.status is SequenceStatus.WAITING:
                return sequence
        return self._shares.next_of(self._order.waiting, step)

    def _claimants(self, step: StepInProgress) -> list[Sequence]:
        """Sequences with granted claims, without those for which ``step`` keeps no token.

        Their tenant's earlier prompts took all that was kept.
        """
        return [seq for seq in self._claims.granted if step.kept.get(seq, 1)]

    def _begin(self, sequence: Sequence, opening: _Opening) -> bool:
        """Start a waiting sequence if there is room; returns whether it runs now."""
        self.starting = sequence
        runs = self._start(sequence, opening)
        self.starting = None
        return runs

    def _start(self, sequence: Sequence, opening: _Opening) -> bool:
        request = sequence.request
        if not opening.budget.can_take(sequence):
            return False
        if num_places([*self._order.running, sequence]) > self._limits.max_num_seqs:
            return False
        num_branches = opening.num_branches + 1
        if request.num_branches > 1:
            num_branches += len(request.first_tokens_due)
            most = max(_MOST_BRANCHES, self._limits.max_num_seqs)
            if opening.num_branches and num_branches > most:
                return False
        # Running beams may wait for this very one: then no reserve is needed.
        gang = request if request.is_gang else None
        alone = all(other.request is gang for other in self._order.running)
        parent = self._families.parent_for(sequence)
        shared = sequence.num_prompt if parent else 0
        reserve = 0 if alone else opening.watermark
        if self._rooms.at_least(sequence, shared) + reserve > opening.room:
            return False  # no room in either regime: skip choosing one at every step
        choice = self._regimes.choose(request)
        sequence.regime = choice.regime
        blocks = self._rooms.next_token(sequence) - self._rooms.shared(sequence, shared)
        if sequence.was_preempted and not alone:
            reserve = max(reserve, self._headroom([sequence]))
        if blocks + reserve > opening.room:
            return False
        if not self._open(sequence, parent, choice):
            return False
        self._order.leave(sequence)
        self._order.run(sequence)
        opening.newcomers.append(sequence)
        opening.num_branches = num_branches
        opening.room -= blocks
        opening.step.append(opening.budget.take(sequence, opening.step.kept.get(sequence) or None))
        return True

    def _swap_in(self, first: Sequence, opening: _Opening) -> bool:
        """Bring a swapped sequence back, with the beams of its group, if there is room."""
        self.starting = first
        runs = self._bring_back(first, opening)
        self.starting = None
        return runs

    def _bring_back(self, first: Sequence, opening: _Opening) -> bool:
        if opening.budget.tokens <= 0:
            return False
        group = with_its_gang(first, self._order.swapped)
        blocks = sum(self._rooms.next_token(seq) for seq in group)
        alone = not self._order.running
        reserve = 0 if alone else self._headroom(group)
        num_after = num_places([*self._order.running, first])
        if blocks + reserve > opening.room or num_after > self._limits.max_num_seqs:
            return False
        opening.room -= blocks
        for sequence in group:
            assert sequence.memory_id is not None
            self._order.leave(sequence)
            sequence.start = SwapIn(sequence.memory_id)
            self._order.run(sequence)
            opening.newcomers.append(sequence)
            if opening.budget.can_take(sequence) and sequence.num_uncomputed:
                opening.step.append(opening.budget.take(sequence))
        return True

    def _headroom(self, newcomers: list[Sequence]) -> int:
        """Blocks that must stay free if these come back.

        Without them they would be preempted again after a few steps, and the copying or computing
        would be wasted.
        """
        return self._rooms.headroom([*self._order.running, *newcomers], self._regimes.mean_output)

    def _open(self, sequence: Sequence, parent: Sequence | None, choice: RegimeChoice) -> bool:
        """Open the sequence in memory and set its start; False if memory has no place for it.

        ``choice``: its request's regime, kept from now on. A new request's regime is chosen again
        if its prompt turns out to be cached.
        """
        request = sequence.request
        open_memory(self._memory, sequence, None if parent is not None else sequence.tokens)
        memory_id = sequence.memory_id
        if memory_id is None:
            return False
        sequence.borrowed = parent is not None
        if parent is not None:
            assert parent.memory_id is not None
            sequence.start = Fork(memory_id, parent.memory_id, sequence.num_prompt)
            sequence.num_computed = sequence.num_published = sequence.num_prompt
            self._regimes.keep(request, choice)
            return True
        sequence.num_published = len(sequence.tokens)
        # Prompt log-probabilities and mean pooling need the whole prompt computed.
        looks = not (request.params.reads_whole_prompt or sequence.starts_over)
        if looks and self._awaits_restore(sequence, memory_id):
            release_memory(self._memory, sequence)
            self.has_deferred = True
            return False
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
        return True

    def _awaits_restore(self, sequence: Sequence, memory_id: int) -> bool:
        """Whether a prefix is being read from a store while others run; waits if none do."""
        starts = (seq.start for seq in self._order.running)
        attaching = [start for start in starts if isinstance(start, Attach)]
        if not self._memory.restore(memory_id, attaching):
            return False
        sequence.num_restoring_steps += 1
        if self._order.running and sequence.num_restoring_steps < MOST_RESTORING_STEPS:
            return True
        self._memory.finish_restores()
        return False

    def _reopen(self, sequence: Sequence, memory_id: int, regime: Regime) -> int:
        """Reopen the sequence in ``regime``, which is cheaper with the cached prefix."""
        self._memory.release(memory_id)
        sequence.regime = regime
        open_memory(self._memory, sequence, sequence.tokens)
        assert sequence.memory_id is not None, "one was closed just now"
        return sequence.memory_id
