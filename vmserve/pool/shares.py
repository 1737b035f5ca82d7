"""Which member may take how much of a pool: numbers alone, without clocks, threads or messages.

Each member is *granted* bytes. A grant that is being lowered counts in full until the member says
that it has no more than the new number committed, so the grants never exceed the pool. A member
that is short gets, in this order,

1. what no member was granted;
2. what others hold and do not use, from idle members first, the one that has been idle for longest
   before the others. No request is preempted for it;
3. if it is below its fair share, what members above theirs hold, down to their fair share. They
   preempt requests for it.

Fair shares are max-min fair by weight: no member has less than its floor, more than its cap, or
more than it has a use for. Every method that changes something returns the orders to be sent.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from vmserve.errors import ConfigurationError
from vmserve.numbers.sizes import format_size

__all__ = ["Borrower", "Holding", "Order", "Shares"]

#: Least change of a grant, as a divisor of the pool: steady load sends no messages.
_STEP = 16
#: Least need for which requests are preempted, as a divisor of the pool.
_TOLERANCE = 64


class Order(NamedTuple):
    """Let a member have ``limit_bytes``. It answers with its :class:`Holding`.

    If it uses more than that, it keeps what it uses; with ``reclaim`` it preempts requests down to
    the limit.
    """

    name: str
    limit_bytes: int
    reclaim: bool


@dataclass(frozen=True, slots=True)
class Holding:
    """What a member has of the pool, and what it would like.

    ``wanted_bytes`` above ``limit_bytes`` are for requests if ``is_short``, else for its prefix
    cache. ``is_idle``: no request runs or waits.
    """

    limit_bytes: int
    committed_bytes: int
    used_bytes: int
    wanted_bytes: int
    is_short: bool
    is_idle: bool


class _Declined(enum.IntEnum):
    """What a member has been asked for in vain, since it last used less than then."""

    NOTHING = 0
    #: All memory that the member does not use.
    UNUSED = 1
    #: All memory that the member can preempt.
    RUNNING = 2


_NOTHING = Holding(0, 0, 0, 0, is_short=False, is_idle=True)


@dataclass(slots=True)
class Borrower:
    """A member; only :class:`Shares` changes it."""

    name: str
    weight: float
    floor: int
    cap: int
    #: Upper bound of what the member has committed, now and until it answers an order.
    granted: int = 0
    #: Limit that the member was last given, or has kept because it uses that much.
    limit: int = 0
    #: Order that the member has not answered.
    asked: Order | None = None
    #: The member's last report.
    holding: Holding = _NOTHING
    #: Whether it waits for its floor.
    is_joining: bool = True
    declined: _Declined = _Declined.NOTHING
    #: Number of the event at which it was last busy.
    last_busy: int = 0
    num_needs: int = 0
    num_recalls: int = 0
    recalled_bytes: int = 0

    @property
    def needs(self) -> bool:
        """Whether it waits for its floor, or requests of it for memory."""
        return self.wanted > self.granted

    @property
    def wanted(self) -> int:
        """What it must have, and what its requests need."""
        asked = self.holding.wanted_bytes if self.holding.is_short else 0
        return max(self.floor, min(asked, self.cap))

    @property
    def demand(self) -> int:
        """What it has a use for, as far as is known."""
        if self.is_joining or self.holding.is_short:
            return self.wanted
        has = self.holding.used_bytes if self.holding.is_idle else self.granted
        return max(self.floor, min(has, self.cap))


@dataclass(slots=True)
class Shares:
    """The members of a pool of ``size`` bytes."""

    size: int
    members: dict[str, Borrower] = field(default_factory=dict)
    _num_events: int = 0

    @property
    def granted(self) -> int:
        return sum(member.granted for member in self.members.values())

    @property
    def free(self) -> int:
        """Bytes granted to no member; negative while a pool that was made smaller shrinks."""
        return self.size - self.granted

    # -- members ------------------------------------------------------------------------

    def join(self, name: str, *, weight: float, floor: int, cap: int | None) -> list[Order]:
        """Add a member, which is given its floor when there are as many bytes.

        ``cap`` None: the whole pool. Raises :class:`ConfigurationError`, with the numbers of all
        members, if floors do not fit.
        """
        if name in self.members:
            raise ConfigurationError(f"a model named {name!r} shares this pool already")
        member = Borrower(name, weight, floor, self.size if cap is None else cap)
        self._check(member)
        self.members[name] = member
        self._reconsider()
        return self._balance()

    def adopt(self, name: str, *, floor: int) -> list[Order]:
        """Add the first member, which has the whole pool already.

        Raises :class:`ConfigurationError` if that is less than its floor.
        """
        assert not self.members
        has = self.size
        member = Borrower(name, 1.0, floor, has, granted=has, limit=has, is_joining=False)
        self._check(member)
        self.members[name] = member
        return [self._order(member, has)]

    def leave(self, name: str) -> list[Order]:
        """Take back everything from a member that has ended. Unknown names are ignored."""
        if self.members.pop(name, None) is None:
            return []
        self._reconsider()
        return self._balance()

    def change(
        self,
        name: str,
        *,
        weight: float | None = None,
        floor: int | None = None,
        cap: int | None = None,
    ) -> list[Order]:
        """Change a member's terms; raises :class:`ConfigurationError`, and changes nothing then."""
        member = self.members[name]
        changed = Borrower(
            name,
            member.weight if weight is None else weight,
            member.floor if floor is None else floor,
            member.cap if cap is None else cap,
        )
        self._check(changed)
        used = member.holding.used_bytes
        if cap is not None and cap < used:
            raise ConfigurationError(
                f"{name}: a cap of {format_size(cap)} is below the {format_size(used)} that its "
                "requests use now"
            )
        member.weight, member.floor, member.cap = changed.weight, changed.floor, changed.cap
        self._reconsider()
        return self._balance()

    def resize(self, size: int) -> list[Order]:
        """Change the pool's size. A smaller one holds when the members have answered.

        Raises :class:`ConfigurationError` if it is below floors, or below what requests use now.
        """
        least = {
            member.name: max(member.floor, member.holding.used_bytes)
            for member in self.members.values()
        }
        if sum(least.values()) > size:
            raise ConfigurationError(
                f"a pool of {format_size(size)} is too small: floors and running requests take "
                + ", ".join(f"{format_size(each)} ({name})" for name, each in least.items())
            )
        for member in self.members.values():
            if member.cap in (self.size, max(member.cap, size)):  # the whole pool, or more
                member.cap = size
        self.size = size
        self._reconsider()
        return self._balance()

    def _check(self, member: Borrower) -> None:
        """Raises :class:`ConfigurationError` for terms that cannot be."""
        name = member.name
        if not 0 < member.weight < float("inf"):
            raise ConfigurationError(f"{name}: the weight {member.weight} is not positive")
        if member.cap < min(member.floor, self.size):
            raise ConfigurationError(
                f"{name}: at most {format_size(member.cap)} of the pool is less than the "
                f"{format_size(member.floor)} that it needs: raise its cap, or lower its floor or "
                "its --max-model-len"
            )
        floors = {each.name: each.floor for each in self.members.values()}
        floors[name] = member.floor
        if sum(floors.values()) > self.size:
            raise ConfigurationError(
                f"the models do not fit together in a pool of {format_size(self.size)}: "
                + ", ".join(f"{each} needs {format_size(size)}" for each, size in floors.items())
                + f", {format_size(sum(floors.values()))} in all: raise --kv-cache-memory, or "
                "lower --max-model-len or floors"
            )

    # -- what members say -----------------------------------------------------------------

    def report(self, name: str, holding: Holding, *, is_answer: bool = False) -> list[Order]:
        """Note what a member says, in answer to its order or by itself."""
        member = self.members.get(name)
        if member is None:
            return []
        self._num_events += 1
        before, member.holding = member.holding, holding
        if not (before.is_idle and holding.is_idle):
            member.last_busy = self._num_events
        if holding.used_bytes < before.used_bytes or holding.is_idle != before.is_idle:
            member.declined = _Declined.NOTHING
        if holding.is_short and not before.is_short:
            member.num_needs += 1
        if is_answer and member.asked is not None:
            order, member.asked = member.asked, None
            if holding.limit_bytes > order.limit_bytes:
                member.declined = _Declined.RUNNING if order.reclaim else _Declined.UNUSED
            member.limit = max(order.limit_bytes, holding.limit_bytes)
        if member.asked is None:
            now = max(member.limit, holding.committed_bytes)
            member.recalled_bytes += max(0, member.granted - now)
            member.granted = min(member.granted, now)
        return self._balance()

    def lost(self, name: str) -> list[Order]:
        """Take back from a member that has died all but its floor, with which it starts again."""
        member = self.members.get(name)
        if member is None:
            return []
        member.holding, member.asked = _NOTHING, None
        if not member.is_joining:
            member.granted = member.limit = min(member.granted, member.floor)
        self._reconsider()
        return self._balance()

    def revived(self, name: str) -> list[Order]:
        """Lend a member that has started again its floor.

        Until then it may not take more than the least that it starts with.
        """
        member = self.members.get(name)
        if member is None or member.is_joining:
            return []
        return [self._order(member, member.granted)]

    # -- the policy -----------------------------------------------------------------------

    def fair_shares(self) -> dict[str, int]:
        """Max-min fair shares by weight, within floors and demands, in bytes."""
        bounds = [(each.weight, each.floor, each.demand) for each in self.members.values()]

        def at_level(level: float) -> list[int]:
            return [max(low, min(int(level * weight), high)) for weight, low, high in bounds]

        enough = max((high / weight for weight, _, high in bounds), default=0.0) + 1
        lowest, highest = 0.0, enough
        if sum(at_level(enough)) <= self.size:
            lowest = enough
        else:
            for _ in range(64):
                level = (lowest + highest) / 2
                if sum(at_level(level)) <= self.size:
                    lowest = level
                else:
                    highest = level
        return dict(zip(self.members, at_level(lowest), strict=True))

    def _reconsider(self) -> None:
        """Ask again those that declined: fair shares are others."""
        for member in self.members.values():
            member.declined = _Declined.NOTHING

    def _balance(self) -> list[Order]:
        fair = self.fair_shares()
        orders = [  # caps that were lowered
            self._recall(member, member.cap, reclaim=True)
            for member in self.members.values()
            if member.limit > member.cap and self._may_ask(member, _Declined.RUNNING)
        ]
        missing = -self.free - self._expected
        if missing > 0:  # the pool was made smaller
            orders += self._find(missing, missing, None, fair)
        needy = [member for member in self.members.values() if member.needs]
        needy.sort(key=lambda each: (not each.is_joining, each.granted / max(1, fair[each.name])))
        for member in needy:
            if self.free < 0:
                break
            orders += self._serve(member, fair)
            if member.needs and (member.is_joining or self._expected):
                return orders  # what comes back is for it first
        for member in self.members.values():  # prefix caches
            more = min(member.holding.wanted_bytes, member.cap) - member.granted
            give = min(more, self.free)
            if give > 0 and (give == more or give >= self._step) and self._may_raise(member):
                orders.append(self._raise(member, member.granted + give))
        return orders

    def _serve(self, member: Borrower, fair: dict[str, int]) -> list[Order]:
        """Give a member what is free; ask others for the rest."""
        orders: list[Order] = []
        wanted = goal = member.wanted
        if not member.is_joining:
            goal = min(member.cap, max(wanted, member.granted + self._step))
        missing = wanted - member.granted
        pending = self._expected
        if self._may_raise(member):
            give = min(goal - member.granted, self.free)
            # A little is given when no more can come, or when it suffices.
            is_enough = give >= min(missing, self._step) or not pending
            if member.is_joining:
                is_enough = give >= missing
            if give > 0 and is_enough:
                orders.append(self._raise(member, member.granted + give))
        if not member.needs:
            return orders
        unused = max(0, goal - member.granted - self.free - pending)
        below_fair = min(wanted, fair[member.name]) - member.granted
        if below_fair <= self._tolerance and not member.is_joining:
            below_fair = 0
        reclaimed = max(0, below_fair - self.free - pending)
        if wanted - member.granted - max(0, self.free) > pending:
            orders += self._find(unused, reclaimed, member, fair)
        return orders

    def _find(
        self, unused: int, reclaimed: int, for_whom: Borrower | None, fair: dict[str, int]
    ) -> list[Order]:
        """Recall ``unused`` bytes from those that do not use them; if none has more of these,
        ``reclaimed`` bytes from those above their fair share."""
        orders: list[Order] = []
        others = [each for each in self.members.values() if each is not for_whom]
        holders = [each for each in others if self._may_ask(each, _Declined.UNUSED)]
        holders.sort(key=lambda each: (not each.holding.is_idle, each.last_busy))
        for each in holders:
            # What a member wants for requests counts as used, or it would take it back at once.
            kept = max(each.wanted, each.holding.used_bytes if each.holding.is_idle else 0)
            part = min(unused, each.limit - kept)
            if part <= 0:
                continue
            orders.append(self._recall(each, each.limit - part))
            unused -= part
            reclaimed -= part
        if orders or self._expected:
            return orders  # their answers say whether one has to preempt
        for each in others:
            above = each.limit - fair[each.name]
            part = min(reclaimed, above)
            enough = 0 if for_whom is None or for_whom.is_joining else self._tolerance
            if part > 0 and above > enough and self._may_ask(each, _Declined.RUNNING):
                orders.append(self._recall(each, each.limit - part, reclaim=True))
                reclaimed -= part
        return orders

    @property
    def _step(self) -> int:
        return max(1, self.size // _STEP)

    @property
    def _tolerance(self) -> int:
        return self.size // _TOLERANCE

    @property
    def _expected(self) -> int:
        """Bytes that members have been asked for, or still have committed above their limit."""
        expected = 0
        for member in self.members.values():
            limit = member.limit if member.asked is None else member.asked.limit_bytes
            expected += max(0, member.granted - limit)
        return expected

    def _may_raise(self, member: Borrower) -> bool:
        return member.asked is None

    def _may_ask(self, member: Borrower, what: _Declined) -> bool:
        return not member.is_joining and member.asked is None and member.declined < what

    def _raise(self, member: Borrower, limit: int) -> Order:
        member.granted, member.is_joining = limit, False
        return self._order(member, limit)

    def _recall(self, member: Borrower, limit: int, *, reclaim: bool = False) -> Order:
        member.num_recalls += 1
        return self._order(member, limit, reclaim=reclaim)

    def _order(self, member: Borrower, limit: int, *, reclaim: bool = False) -> Order:
        member.asked = Order(member.name, limit, reclaim)
        return member.asked
