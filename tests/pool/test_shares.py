"""Laws of a shared pool: joins, leaves, needs, answers and deaths in any order and delay."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vmserve.errors import ConfigurationError
from vmserve.pool.shares import Holding, Order, Shares

POOL = 6400


@dataclass
class Engine:
    """What a member is as far as the pool knows: it keeps to its limit and answers some time."""

    least: int
    limit: int = 0
    committed: int = 0
    used: int = 0
    #: What its requests would take, and the one of them that cannot be preempted away.
    wanted: int = 0
    orders: list[Order] = field(default_factory=list)
    is_dead: bool = False

    def holding(self) -> Holding:
        is_short = self.wanted > self.limit
        return Holding(
            self.limit, self.committed, self.used, self.wanted, is_short, self.wanted == 0
        )

    def run(self) -> None:
        """Use as much as requests want and the limit allows; what was used stays cached."""
        self.used = min(self.wanted, max(self.limit, 0))
        self.committed = max(self.committed, self.used)

    def obey(self, *, is_late: bool) -> None:
        """Carry out the oldest order. ``is_late``: a step holds pages above the limit for now."""
        order = self.orders.pop(0)
        if order.reclaim:
            self.used = min(self.used, max(order.limit_bytes, self.least))
        if order.limit_bytes < self.limit:
            self.limit = min(self.limit, max(order.limit_bytes, self.used))
        else:
            self.limit = order.limit_bytes
        if not is_late:
            self.committed = min(self.committed, self.limit)


class Pool(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares(POOL)
        self.engines: dict[str, Engine] = {}
        self.had_floor: set[str] = set()
        self.num_joined = 0

    def send(self, orders: list[Order]) -> None:
        for order in orders:
            engine = self.engines[order.name]
            assert not engine.orders, "one order at a time"
            if not engine.is_dead:
                engine.orders.append(order)

    def tell(self, name: str, *, is_answer: bool = False) -> None:
        holding = self.engines[name].holding()
        self.send(self.shares.told(name, holding, is_answer=is_answer))

    def names(self, *, dead: bool = False) -> list[str]:
        return [name for name, engine in self.engines.items() if engine.is_dead == dead]

    @precondition(lambda self: len(self.engines) < 4)
    @rule(
        floor=st.sampled_from([1, 100, POOL // 3, POOL]),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
        cap=st.none() | st.sampled_from([50, POOL // 2, POOL]),
    )
    def join(self, floor: int, weight: float, cap: int | None) -> None:
        name = f"m{self.num_joined}"
        self.num_joined += 1
        fits = floor + sum(member.floor for member in self.shares.members.values()) <= POOL
        if not fits or (cap is not None and cap < floor):
            with pytest.raises(ConfigurationError):
                self.shares.join(name, weight=weight, floor=floor, cap=cap)
            assert name not in self.shares.members
            return
        self.engines[name] = Engine(floor, limit=0)
        self.send(self.shares.join(name, weight=weight, floor=floor, cap=cap))

    @precondition(lambda self: self.names())
    @rule(data=st.data(), wanted=st.sampled_from([0, 0, POOL // 3, POOL, 2 * POOL]))
    def ask(self, data: st.DataObject, wanted: int) -> None:
        engine = self.engines[name := data.draw(st.sampled_from(self.names()))]
        engine.wanted = wanted
        engine.run()
        if not self.shares.members[name].is_joining:
            self.tell(name)

    @precondition(lambda self: self.names())
    @rule(data=st.data())
    def run_silently(self, data: st.DataObject) -> None:
        self.engines[data.draw(st.sampled_from(self.names()))].run()

    @precondition(lambda self: self.ordered())
    @rule(data=st.data(), is_late=st.booleans())
    def answer(self, data: st.DataObject, is_late: bool) -> None:
        engine = self.engines[name := data.draw(st.sampled_from(self.ordered()))]
        engine.obey(is_late=is_late)
        engine.run()
        self.tell(name, is_answer=True)

    @rule(data=st.data())
    def end_step(self, data: st.DataObject) -> None:
        late = [name for name, each in self.engines.items() if each.committed > each.limit]
        if not late:
            return
        engine = self.engines[name := data.draw(st.sampled_from(late))]
        engine.committed = max(engine.limit, engine.used)
        self.tell(name)

    @precondition(lambda self: self.names())
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names()))
        if self.shares.members[name].is_joining:
            return
        self.engines[name] = Engine(self.engines[name].least, is_dead=True)
        self.send(self.shares.lost(name))

    @precondition(lambda self: self.names(dead=True))
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names(dead=True)))
        least = self.engines[name].least
        self.engines[name] = Engine(least, limit=least)
        self.send(self.shares.revived(name))

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engines)))
        del self.engines[name]
        self.had_floor.discard(name)
        self.send(self.shares.leave(name))

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), weight=st.sampled_from([0.5, 2.0]), cap=st.integers(1, POOL))
    def change(self, data: st.DataObject, weight: float, cap: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.engines)))
        member = self.shares.members[name]
        if cap < max(member.floor, member.holding.used_bytes):
            with pytest.raises(ConfigurationError):
                self.shares.change(name, cap=cap)
        else:
            self.send(self.shares.change(name, weight=weight, cap=cap))

    def ordered(self) -> list[str]:
        return [name for name, engine in self.engines.items() if engine.orders]

    @precondition(lambda self: self.ordered())
    @rule()
    def settle(self) -> None:
        """Everybody answers and no request comes or goes: every need below the fair share is
        met."""
        for _ in range(200):
            if not (busy := self.ordered()):
                break
            self.engines[busy[0]].obey(is_late=False)
            self.engines[busy[0]].run()
            self.tell(busy[0], is_answer=True)
        else:
            raise AssertionError("orders without end")
        for engine in self.engines.values():
            engine.run()
        fair = self.shares.fair_shares()
        late = any(engine.committed > engine.limit for engine in self.engines.values())
        for name, member in self.shares.members.items():
            if member.is_joining or self.engines[name].is_dead or late:
                continue
            owed = min(member.wanted, fair[name]) - member.granted
            assert owed <= POOL // 64, (name, owed, self.shares)

    @invariant()
    def pool_is_never_exceeded(self) -> None:
        assert self.shares.granted <= POOL
        assert sum(max(e.committed, 0) for e in self.engines.values()) <= POOL
        for name, engine in self.engines.items():
            granted = self.shares.members[name].granted
            assert max(engine.limit, engine.committed) <= granted

    @invariant()
    def nobody_is_below_its_floor(self) -> None:
        for name, member in self.shares.members.items():
            if not member.is_joining:
                self.had_floor.add(name)
            if name in self.had_floor:
                assert member.granted >= member.floor

    def teardown(self) -> None:
        for name in list(self.engines):
            self.shares.leave(name)
        assert self.shares.free == POOL


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
