"""Regimes of the sequences that a scheduler serves: chosen, kept, and changed while they run."""

from __future__ import annotations

from collections.abc import Iterable

from vmserve.memory.base import Convert, KVMemory, MemoryOp, Regime
from vmserve.scheduler.regime import RegimeChoice, RegimePolicy, RunningLength, Situation
from vmserve.scheduler.sequence import Request, Sequence, SequenceStatus
from vmserve.scheduler.siblings import has_followers

__all__ = ["RegimeKeeper"]

#: Share of the pool below which what can be had is scarce.
_SCARCE = 0.2
#: Share of what is known of slots that is forgotten with each request.
_FADED = 0.05
#: How often the regimes of those that run are looked at again.
_RECONSIDER_STEPS = 32


class _SlotHistory:
    """What slots lose of the pages that virtual sequences had in them, lately.

    A page is mapped into a slot once, and a parked slot shows it to its next sequence. Sequences
    pay again for the pages that slots have lost meanwhile. While nothing is known, or not any
    more, slots are taken to keep their pages: if they were taken to lose them, all requests might
    be paged, and nobody would find out.
    """

    def __init__(self) -> None:
        self._num_unmapped = 0
        self._lost = 0.0
        self._used = 0.0

    def lost(self, pages_unmapped_total: int) -> None:
        self._lost += pages_unmapped_total - self._num_unmapped
        self._num_unmapped = pages_unmapped_total

    def used(self, num_pages: int) -> None:
        """A virtual sequence that had so many pages has ended, or was preempted."""
        self._used += num_pages

    def fade(self) -> None:
        """One more request has begun."""
        self._lost *= 1 - _FADED
        self._used *= 1 - _FADED

    def unmapped_share(self, num_pages: int) -> float:
        """Of the pages that a sequence with ``num_pages`` takes, what its slot does not show. The
        guess that slots keep their pages weighs as much as one such sequence."""
        return min(1.0, self._lost / (self._used + max(1, num_pages)))


class RegimeKeeper:
    """``running`` and ``waiting``: the scheduler's own lists of sequences."""

    def __init__(
        self,
        policy: RegimePolicy,
        memory: KVMemory,
        running: list[Sequence],
        waiting: list[Sequence],
    ) -> None:
        self._policy = policy
        self._memory = memory
        self._running = running
        self._waiting = waiting
        #: Running sequences that are to change their regime.
        self._converting: dict[Sequence, Regime] = {}
        self._num_steps = 0
        self._slots = _SlotHistory()

    # -- choices ------------------------------------------------------------------------

    @property
    def predicts(self) -> bool:
        """Whether a choice depends on what surrounds the request."""
        return self._policy.predicts

    @property
    def mean_output(self) -> float:
        """Tokens that requests generated lately, on average."""
        return self._policy.mean_output

    def choose(self, request: Request, num_hit: int = 0) -> RegimeChoice:
        """Where the request is kept, or else should be as things are.

        ``num_hit``: tokens of its prompt that are cached.
        """
        metrics = request.metrics
        if request.regime is not None:
            return RegimeChoice(request.regime, metrics.kv_regime_reason, metrics.kv_regime_costs)
        if not self.predicts:
            return self._policy.choose(request)
        around = self._situation(request, num_hit)
        return self._policy.choose(request, around, lambda: self._moving(around))

    def keep(self, request: Request, choice: RegimeChoice) -> None:
        """The request is kept there from now on; with it all that run, if that is the choice."""
        is_new = request.regime is None
        request.regime = choice.regime
        metrics = request.metrics
        metrics.kv_regime, metrics.kv_regime_reason = choice.regime.value, choice.reason
        metrics.kv_regime_costs = choice.predicted
        if is_new:
            self._slots.fade()
            self._policy.kept(choice)
            if choice.moves_batch:
                self._convert_all(choice.regime)

    def _situation(self, request: Request, num_hit: int) -> Situation:
        """What a request finds that is admitted now."""
        num_new = len(request.prompt_token_ids) - num_hit + self._policy.expected_output(request)
        use = self._memory.slot_use()
        num_virtual = sum(self._goal(seq) is Regime.VIRTUAL for seq in self._running)
        self._slots.lost(use.pages_unmapped_total)
        layout = self._memory.layout
        # If none of its pages lies behind the one before it, as when it is short.
        mappings = layout.num_groups * layout.pages_for(num_new + num_hit)
        free_slots = self._memory.num_slots - max(use.used_slots, num_virtual)
        return Situation(
            num_virtual=num_virtual,
            num_paged=len(self._running) - num_virtual,
            num_free_slots=free_slots if mappings <= use.free_mappings else 0,
            num_hit=num_hit,
            pressure=self._pressure(num_new),
            unmapped_share=self._slots.unmapped_share(self._memory.layout.pages_for(num_new)),
            limit_pages=self._memory.limit_pages,
            fixed_seconds=self._policy.fixed_seconds,
            num_preemptions=self._policy.num_preemptions,
        )

    def _pressure(self, num_new: int) -> float:
        """Of memory, with all who wait admitted, if each takes ``num_new`` tokens."""
        wanted = len(self._waiting) * self._memory.layout.pages_for(num_new)
        left = (self._memory.available_pages() - wanted) / self._memory.limit_pages
        return min(1.0, max(0.0, 1 - left / _SCARCE))

    def _goal(self, sequence: Sequence) -> Regime:
        """Where a running sequence is, or is to be soon."""
        return self._converting.get(sequence, sequence.regime)

    def _moving(self, around: Situation) -> float | None:
        """What it costs those that run, all of one regime, to change to the other; below 0 where
        they gain by it. None: some must stay, or it is not known."""
        running, forking = self._lengths()
        if self._converting or forking:
            return None
        [regime] = [regime for regime, lengths in running.items() if lengths]
        if regime is Regime.PAGED and len(running[regime]) >= around.num_free_slots:
            return None  # the newcomer wants one, too
        return self._policy.cost_of_moving(regime, running[regime], around.page_step_seconds)

    def _lengths(self) -> tuple[dict[Regime, list[RunningLength]], set[Regime]]:
        """Of all that run, by regime; and the regimes in which some fork, and so must stay."""
        running: dict[Regime, list[RunningLength]] = {regime: [] for regime in Regime}
        forking: set[Regime] = set()
        for sequence in self._running:
            request = sequence.request
            if request.is_gang or has_followers(request):
                forking.add(sequence.regime)
            left = max(1, self._policy.expected_output(request) - sequence.num_output)
            running[sequence.regime].append(RunningLength(sequence.num_tokens, left))
        return running, forking

    # -- changes ------------------------------------------------------------------------

    def convert(self, request: Request, regime: Regime, reason: str) -> None:
        """Whatever of the request has memory changes as soon as there is memory for that."""
        request.regime = regime
        request.metrics.kv_regime_reason = reason
        for sequence in request.sequences:
            if sequence.status in (SequenceStatus.RUNNING, SequenceStatus.SWAPPED):
                self._converting[sequence] = regime

    def inherit(self, parent: Sequence, child: Sequence) -> None:
        """A fork is to go where its parent goes."""
        child.regime = parent.regime
        if parent in self._converting:
            self._converting[child] = self._converting[parent]

    def forget(self, sequence: Sequence) -> None:
        """It has no memory that could change, or gives it back now."""
        self._converting.pop(sequence, None)
        if sequence.regime is Regime.VIRTUAL and sequence.memory_id is not None:
            self._slots.used(self._memory.layout.pages_for(sequence.num_computed))

    def leave_slots(self) -> bool:
        """All that run in slots are to change to the block table, where regimes are free to be
        chosen; False if that was asked for before."""
        if not self.predicts:
            return False
        num_before = len(self._converting)
        self._convert_all(Regime.PAGED, "mappings")
        return len(self._converting) > num_before

    def give_up(self) -> bool:
        """Conversions are wishes: without memory for them there are none. Whether there were."""
        had_some = bool(self._converting)
        self._converting.clear()
        return had_some

    def conversions(self) -> list[Convert]:
        """Of those that run: not of one that starts in this step, or is there already."""
        for sequence, regime in list(self._converting.items()):
            if sequence.regime is regime:
                del self._converting[sequence]
        return [
            Convert(sequence.memory_id, regime)
            for sequence, regime in self._converting.items()
            if sequence.status is SequenceStatus.RUNNING
            and sequence.memory_id is not None
            and sequence.start is None
        ]

    def converted(self, ops: Iterable[MemoryOp]) -> None:
        """The memory has done these."""
        for op in ops:
            if isinstance(op, Convert):
                sequence = next(seq for seq in self._running if seq.memory_id == op.seq)
                sequence.regime = self._converting.pop(sequence)
                sequence.request.metrics.kv_regime = sequence.regime.value

    def reconsider(self) -> None:
        """Once a step; now and then, whether the batch costs less in one regime than in two."""
        self._num_steps += 1
        if self._num_steps % _RECONSIDER_STEPS or not self.predicts or self._converting:
            return
        if all(sequence.regime is self._running[0].regime for sequence in self._running):
            return
        running, forking = self._lengths()
        ends = [length + left for each in running.values() for length, left in each]
        around = Situation(
            pressure=self._pressure(sum(ends) // len(ends)),
            limit_pages=self._memory.limit_pages,
            fixed_seconds=self._policy.fixed_seconds,
        )
        leaving = self._policy.reconsider(running, forking, around.page_step_seconds)
        if leaving is not None:
            self._convert_all(leaving.other)

    def _convert_all(self, regime: Regime, reason: str = "batch") -> None:
        requests = [seq.request for seq in self._running if seq.regime is not regime]
        for request in dict.fromkeys(requests):
            self.convert(request, regime, reason)
