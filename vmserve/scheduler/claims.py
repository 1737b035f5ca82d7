"""Claims: which waiting sequences take places from running ones, and from which.

A waiting sequence has a claim on the places and the memory of

- running sequences of lower priority, last arrival first (``--scheduling-policy priority``);
- with ``--fair-sharing``, the tenant with the most places, if it has had at least the tokens of the
  claimant, less one step's, and still has as many places afterwards. Its last arrival is
  preempted. A tenant at or below the mean of all tenants is never a victim.

A claim is granted once, and only if an estimate says that its victims suffice. A granted sequence
is the next to be admitted, and some of the next step's tokens are kept for its prompt.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import Counter
from typing import TYPE_CHECKING, Literal, NamedTuple

from vmserve.scheduler.sequence import SequenceStatus, num_places, with_its_gang

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vmserve.scheduler.budget import SchedulerLimits
    from vmserve.scheduler.fairness import OneTenant, TenantShares
    from vmserve.scheduler.order import Order
    from vmserve.scheduler.regime_keeper import RegimeKeeper
    from vmserve.scheduler.rooms import Rooms
    from vmserve.scheduler.sequence import Sequence

__all__ = ["Claim", "ClaimReason", "Claims"]

ClaimReason = Literal["priority", "fairness"]


class Claim(NamedTuple):
    """``victims``: sequences preempted for ``sequence``, each with the beams of its group."""

    sequence: Sequence
    victims: list[tuple[list[Sequence], ClaimReason]]


class _Occupancy:
    """What runs, without the victims chosen so far: places by tenant, and available blocks."""

    def __init__(self, running: list[Sequence], by_tenant: Counter[str], num_blocks: int) -> None:
        self.running = list(running)
        self.by_tenant = by_tenant.copy()
        self.blocks = num_blocks

    @property
    def places(self) -> int:
        return self.by_tenant.total()

    def give_up(self, group: list[Sequence], tenant: str, num_blocks: int) -> None:
        places = num_places(group)
        self.running = [seq for seq in self.running if seq not in group]
        self.by_tenant[tenant] -= places
        self.blocks += num_blocks


class Claims:
    """Finds claims of the sequences that wait, one after the other in a step."""

    def __init__(
        self,
        limits: SchedulerLimits,
        order: Order,
        rooms: Rooms,
        regimes: RegimeKeeper,
        shares: TenantShares | OneTenant,
    ) -> None:
        self._limits = limits
        self._order = order
        self._rooms = rooms
        self._regimes = regimes
        self._shares = shares
        self._tenant_of = shares.tenant_of
        self._granted: list[Sequence] = []

    @property
    def granted(self) -> list[Sequence]:
        """Sequences with granted claims that are not admitted yet, in order of rank."""
        if self._granted:
            self._granted = [
                seq
                for seq in self._granted
                if seq.status in (SequenceStatus.WAITING, SequenceStatus.SWAPPED)
            ]
        return self._granted

    def grant(self, claim: Claim) -> None:
        insort(self._granted, claim.sequence, key=lambda seq: seq.rank)

    def find(self) -> Claim | None:
        """The next claim that can be met, or None. Changes nothing."""
        order = self._order
        if not order.running or not (order.waiting or order.swapped):
            return None
        if not (self._shares.num_tenants > 1 or self._has_urgent()):
            return None
        by_tenant = self._places_by_tenant()
        candidates = [seq for seq in self._candidates() if self._may_claim(seq, by_tenant)]
        if not candidates:
            return None  # most steps of a busy engine
        occupancy = self._occupancy(by_tenant)
        candidates.sort(key=lambda seq: (seq.rank, by_tenant[self._tenant_of(seq)]))
        for sequence in candidates:
            claim = self._claim(sequence, occupancy)
            if claim is not None:
                return claim
        return None

    def victims_of_shortage(self) -> list[Sequence]:
        """Sequences to preempt when memory is short: the last arrival, with its beams.

        With fair sharing: the last arrival of the tenant with the most places. The first of all
        running sequences is never chosen with others still running, so one always continues.
        """
        running, tenant_of = self._order.running, self._tenant_of
        last = running[-1]
        places = Counter(map(tenant_of, running))
        first = with_its_gang(running[0], running)
        last_of_tenant = {
            tenant_of(seq): seq for seq in running if seq.rank == last.rank and seq not in first
        }
        last = max(
            last_of_tenant.values(),
            key=lambda seq: (places[tenant_of(seq)], seq.order),
            default=last,
        )
        return with_its_gang(last, running)

    # -- claimants ----------------------------------------------------------------------

    def _has_urgent(self) -> bool:
        """Whether a sequence waits with a higher priority than one that runs or is swapped out."""
        firsts = (
            next((seq for seq in each if not seq.is_raised), None)
            for each in (self._order.waiting, self._order.swapped)
        )
        return any(seq is not None and self._outranks_some(seq) for seq in firsts)

    def _outranks_some(self, sequence: Sequence) -> bool:
        """Whether a running or swapped sequence has a lower priority."""
        queues = (self._order.running, self._order.swapped)
        return any(queue and queue[-1].rank > sequence.rank for queue in queues)

    def _candidates(self) -> list[Sequence]:
        """The first waiting sequence of each tenant: by rank, swapped ones first, then by
        arrival.

        A raised sequence gets the next free place. Those of its tenant which it went before until
        it was raised do not claim one ahead of it.
        """
        granted = self.granted
        firsts: dict[str, Sequence] = {}
        num_tenants = self._shares.num_tenants
        raised: dict[str, int] = {}
        for queue in (self._order.swapped, self._order.waiting):
            for sequence in itertools.takewhile(lambda seq: seq.is_raised, queue):
                tenant, own_rank = self._tenant_of(sequence), sequence.request.rank
                raised[tenant] = min(own_rank, raised.get(tenant, own_rank))
        for queue in (self._order.swapped, self._order.waiting):
            seen = set()
            for sequence in queue:
                tenant = self._tenant_of(sequence)
                if tenant in seen or sequence.is_raised or sequence in granted:
                    continue
                if tenant in raised and sequence.request.rank >= raised[tenant]:
                    continue
                seen.add(tenant)
                known = firsts.get(tenant)
                if known is None or sequence.rank < known.rank:
                    firsts[tenant] = sequence
                if len(seen) == num_tenants:
                    break
        return list(firsts.values())

    def _may_claim(self, sequence: Sequence, by_tenant: Counter[str]) -> bool:
        """Whether a running or swapped sequence exists that might be a victim."""
        return self._outranks_some(sequence) or (
            max(by_tenant.values()) > by_tenant[self._tenant_of(sequence)]
        )

    def _places_by_tenant(self) -> Counter[str]:
        """Places by tenant, counted as if granted sequences already ran."""
        by_tenant: Counter[str] = Counter()
        gangs = set()
        waiting = (seq for granted in self.granted for seq in self._group(granted))
        for sequence in itertools.chain(self._order.running, waiting):
            request, tenant = sequence.request, self._tenant_of(sequence)
            if not request.is_gang:
                by_tenant[tenant] += 1
            elif request not in gangs:
                gangs.add(request)
                by_tenant[tenant] += request.num_branches
        return by_tenant

    def _occupancy(self, by_tenant: Counter[str]) -> _Occupancy:
        running = self._order.running
        blocks = self._rooms.left(running)
        blocks -= sum(self._needs(self._group(seq)) for seq in self.granted)
        return _Occupancy(running, by_tenant, blocks)

    def _group(self, sequence: Sequence) -> list[Sequence]:
        if sequence.status is SequenceStatus.SWAPPED:
            return with_its_gang(sequence, self._order.swapped)
        return [sequence]

    # -- victims ------------------------------------------------------------------------

    def _claim(self, sequence: Sequence, now: _Occupancy) -> Claim | None:
        group = self._group(sequence)
        places = num_places([*now.running, *group]) - num_places(now.running)
        needs = self._needs(group)
        left = _Occupancy(now.running, now.by_tenant, now.blocks)
        victims: list[tuple[list[Sequence], ClaimReason]] = []
        while (
            left.places + places > self._limits.max_num_seqs
            or needs + self._reserve(group, left) > left.blocks
        ):
            victim = self._next_victim(sequence, places, left)
            if victim is None:
                return None
            victims.append(victim)
            freed = sum(self._freed(seq) for seq in victim[0])
            left.give_up(victim[0], self._tenant_of(victim[0][0]), freed)
        if not victims and not self._goes_first(sequence, places, left):
            return None
        return Claim(sequence, victims)

    def _next_victim(
        self, sequence: Sequence, places: int, left: _Occupancy
    ) -> tuple[list[Sequence], ClaimReason] | None:
        if not left.running:
            return None
        last = left.running[-1]
        if last.rank > sequence.rank:
            return with_its_gang(last, left.running), "priority"
        tenant_of, claimant = self._tenant_of, self._tenant_of(sequence)
        if any(tenant_of(seq) == claimant for seq in self.granted):
            return None  # one place for a tenant in a step
        for tenant, _ in left.by_tenant.most_common():
            of_tenant = [seq for seq in left.running if tenant_of(seq) == tenant]
            if not of_tenant or of_tenant[-1].rank != sequence.rank:
                continue
            group = with_its_gang(of_tenant[-1], of_tenant)
            if self._is_over(tenant, num_places(group), claimant, places, left):
                return group, "fairness"
        return None

    def _is_over(
        self, tenant: str, given: int, claimant: str, taken: int, left: _Occupancy
    ) -> bool:
        """Whether ``tenant`` can give ``given`` places to ``claimant``, which takes ``taken``."""
        held = left.by_tenant[tenant]
        slack = self._limits.max_num_batched_tokens
        return (
            tenant != claimant
            and held * self._shares.num_tenants > left.by_tenant.total()
            and held - given >= left.by_tenant[claimant] + taken
            and self._shares.tokens_of(tenant) + slack >= self._shares.tokens_of(claimant)
        )

    def _goes_first(self, sequence: Sequence, places: int, left: _Occupancy) -> bool:
        """Whether the sequence goes before earlier arrivals, there being room without victims."""
        queues = (self._order.waiting, self._order.swapped)
        if any(queue and queue[0].is_raised for queue in queues):
            return False
        claimant = self._tenant_of(sequence)
        return self._outranks_some(sequence) or any(
            self._is_over(who, 0, claimant, places, left) for who in left.by_tenant
        )

    # -- estimates, in blocks -----------------------------------------------------------

    def _needs(self, group: Iterable[Sequence]) -> int:
        """Blocks that these need at most, in either regime."""
        return sum(self._rooms.at_most(seq) for seq in group)

    def _reserve(self, group: list[Sequence], left: _Occupancy) -> int:
        """Blocks that must stay free besides these, as for every admission."""
        reserve = self._rooms.watermark
        if any(seq.was_preempted for seq in group):
            ahead = self._rooms.headroom([*left.running, *group], self._regimes.mean_output)
            reserve = max(reserve, ahead)
        return reserve

    def _freed(self, sequence: Sequence) -> int:
        """Blocks that a victim frees at least: without a prompt that others may share."""
        has = self._rooms.blocks(sequence, sequence.num_computed)
        if sequence.start is not None:
            has = 0
        elif sequence.borrowed or sequence.request.num_branches > 1:
            has -= self._rooms.shared(sequence, min(sequence.num_prompt, sequence.num_computed))
        return has + self._rooms.owed(sequence)
