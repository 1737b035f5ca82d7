"""Laws of a shared pool: joins, leaves, needs, answers and deaths in any order and delay."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

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
    #: As of its last step: an answer does not look again.
    is_short: bool = False

    def holding(self) -> Holding:
        return Holding(
            self.limit, self.committed, self.used, self.wanted, self.is_short, self.wanted == 0
        )

    def run(self) -> None:
        """Use as much as requests want and the limit allows; what was used stays cached."""
        self.used = min(self.wanted, max(self.limit, 0))
        self.committed = max(self.committed, self.used)

    def step(self) -> None:
        self.run()
        self.is_short = self.wanted > self.limit

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


class Walk:
    """One random walk. Everything but :meth:`settle` happens in any order and as late as can be."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.shares = Shares(POOL)
        self.engines: dict[str, Engine] = {}
        self.had_floor: set[str] = set()
        self.num_joined = 0

    def run(self, num_steps: int) -> None:
        often = [self.ask, self.answer, self.run_one, self.end_step]
        seldom = [self.join, self.leave, self.die, self.revive, self.change, self.settle]
        for _ in range(num_steps):
            self.random.choice(often if self.random.random() < 0.8 else seldom)()
            self.check()
        for name in list(self.engines):
            self.shares.leave(name)
        assert self.shares.free == POOL

    # -- messages -----------------------------------------------------------------------

    def send(self, orders: list[Order]) -> None:
        for order in orders:
            engine = self.engines[order.name]
            assert not engine.orders, "one order at a time"
            if not engine.is_dead:
                engine.orders.append(order)

    def tell(self, name: str, *, is_answer: bool = False) -> None:
        holding = self.engines[name].holding()
        self.send(self.shares.report(name, holding, is_answer=is_answer))

    def pick(self, names: list[str]) -> str | None:
        return self.random.choice(names) if names else None

    def alive(self) -> list[str]:
        """Members that serve."""
        return [
            name
            for name, engine in self.engines.items()
            if not (engine.is_dead or self.shares.members[name].is_joining)
        ]

    def ordered(self) -> list[str]:
        return [name for name, engine in self.engines.items() if engine.orders]

    # -- what happens ---------------------------------------------------------------------

    def join(self) -> None:
        if len(self.engines) == 4:
            return
        name = f"m{self.num_joined}"
        self.num_joined += 1
        floor = self.random.choice([1, 100, POOL // 3, POOL])
        cap = self.random.choice([None, None, 50, POOL // 2, POOL])
        weight = self.random.choice([0.5, 1.0, 3.0])
        fits = floor + sum(member.floor for member in self.shares.members.values()) <= POOL
        if not fits or (cap is not None and cap < floor):
            with pytest.raises(ConfigurationError):
                self.shares.join(name, weight=weight, floor=floor, cap=cap)
            assert name not in self.shares.members
            return
        self.engines[name] = Engine(floor)
        self.send(self.shares.join(name, weight=weight, floor=floor, cap=cap))

    def leave(self) -> None:
        if (name := self.pick(list(self.engines))) is not None:
            del self.engines[name]
            self.had_floor.discard(name)
            self.send(self.shares.leave(name))

    def die(self) -> None:
        if (name := self.pick(self.alive())) is not None:
            self.engines[name] = Engine(self.engines[name].least, is_dead=True)
            self.send(self.shares.lost(name))

    def revive(self) -> None:
        dead = [name for name, engine in self.engines.items() if engine.is_dead]
        if (name := self.pick(dead)) is not None:
            least = self.engines[name].least
            self.engines[name] = Engine(least, limit=least)
            self.send(self.shares.revived(name))

    def change(self) -> None:
        if (name := self.pick(list(self.engines))) is None:
            return
        member = self.shares.members[name]
        cap = self.random.choice([POOL // 4, POOL // 2, POOL])
        if cap < max(member.floor, member.holding.used_bytes):
            with pytest.raises(ConfigurationError):
                self.shares.change(name, cap=cap)
        else:
            self.send(self.shares.change(name, weight=self.random.choice([0.5, 2.0]), cap=cap))

    def ask(self) -> None:
        """Requests come or go, and a step sees it."""
        if (name := self.pick(self.alive())) is None:
            return
        engine = self.engines[name]
        engine.wanted = self.random.choice([0, 0, POOL // 8, POOL // 3, POOL, 2 * POOL])
        engine.step()
        self.tell(name)

    def run_one(self) -> None:
        if (name := self.pick(self.alive())) is not None:
            self.engines[name].run()

    def answer(self) -> None:
        if (name := self.pick(self.ordered())) is not None:
            self.engines[name].obey(is_late=self.random.random() < 0.5)
            self.engines[name].run()
            self.tell(name, is_answer=True)

    def end_step(self) -> None:
        """What was held above the limit is given back."""
        late = [name for name, each in self.engines.items() if each.committed > each.limit]
        if (name := self.pick(late)) is not None:
            engine = self.engines[name]
            engine.committed = engine.limit
            engine.step()
            self.tell(name)

    def settle(self) -> None:
        """Everybody answers, and no request comes or goes."""
        for _ in range(200):
            late = [name for name, each in self.engines.items() if each.committed > each.limit]
            if (name := self.pick(self.ordered())) is not None:
                self.engines[name].obey(is_late=False)
                self.engines[name].run()
                self.tell(name, is_answer=True)
            elif late:
                self.end_step()
            else:
                break
            self.check()
        else:
            raise AssertionError("orders without end")
        fair = self.shares.fair_shares()
        for name in self.alive():
            member, engine = self.shares.members[name], self.engines[name]
            if engine.is_short:  # nobody preempts for a 64th of the pool, so each may owe as much
                owed = min(member.wanted, fair[name]) - member.granted
                assert owed <= len(self.engines) * (POOL // 64), name
        if not any(engine.is_dead for engine in self.engines.values()):
            assert not any(member.is_joining for member in self.shares.members.values())

    # -- laws -----------------------------------------------------------------------------

    def check(self) -> None:
        assert self.shares.granted <= POOL
        for name, engine in self.engines.items():
            member = self.shares.members[name]
            assert max(engine.limit, engine.committed) <= member.granted
            if not member.is_joining:
                self.had_floor.add(name)
            if name in self.had_floor:
                assert member.granted >= member.floor


def test_laws_hold_on_random_walks() -> None:
    for seed in range(300):
        walk = Walk(seed)
        try:
            walk.run(300)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {walk.shares}") from error
