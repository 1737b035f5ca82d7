"""What an engine gives back of the memory that a pool lends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulation.test_engine import SECONDS
from vmserve.engine.lease import Lease
from vmserve.memory.layout import plan_layout
from vmserve_bench.simulation import Asked, SimulatedEngine, SimulationConfig, replay

PAGE = 1 << 16
MARGIN = 1 + 2 + 1  # pages: one, one for each running sequence, a 64th of the limit


class Engine:
    """As much of an engine as a lease sees: 100 pages, 2 running sequences."""

    def __init__(self) -> None:
        self.now = 50.0
        self.used = 0
        self.limit_bytes = 100 * PAGE
        self.layout = SimpleNamespace(total_page_bytes=PAGE)
        scheduler = SimpleNamespace(num_running=2, num_waiting=0, give_way=self.preempt)
        longest = SimpleNamespace(least_bytes=lambda pinned: 10 * PAGE)
        parts: list[Any] = [self, scheduler, SimpleNamespace(num_pages=0), longest]
        self.lease = Lease(*parts, clock=lambda: self.now)
        self.lease.order(self.limit_bytes, reclaim=False)
        self.lease.obey()

    @property
    def limit_pages(self) -> int:
        return self.limit_bytes // PAGE

    @property
    def committed_bytes(self) -> int:
        return self.limit_bytes

    def stats(self) -> Any:
        free = self.limit_pages - self.used
        return SimpleNamespace(committed_pages=self.limit_pages, free_pages=free, idle_pages=0)

    def set_limit(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes

    def preempt(self) -> bool:
        self.used -= 1
        return True

    def recalled(self, pages: int, *, reclaim: bool = False) -> int:
        """Ask for all but so many pages; returns how many it keeps."""
        self.lease.order(pages * PAGE, reclaim=reclaim)
        self.lease.obey()
        return self.limit_pages


@pytest.fixture
def engine() -> Engine:
    """One that is busy and used 60 pages a moment ago."""
    engine = Engine()
    engine.lease.take_news(is_idle=True)
    engine.used = 60
    engine.lease.take_news(is_idle=False)  # its first request
    engine.used = 20
    return engine


def test_a_busy_engine_keeps_what_its_requests_held_lately(engine: Engine) -> None:
    engine.now += 0.9
    assert engine.recalled(80) == 80
    assert engine.recalled(12) == 60 + MARGIN
    engine.now += 2.0
    assert engine.recalled(12) == 20 + MARGIN


def test_nothing_is_kept_from_a_preempting_order_or_by_an_idle_engine(engine: Engine) -> None:
    assert engine.recalled(15, reclaim=True) == 15
    assert engine.used == 15
    engine = Engine()
    engine.used = 60
    engine.lease.order(engine.limit_bytes, reclaim=False)
    engine.lease.obey()
    engine.used = 0
    assert engine.recalled(5) == 10  # the least


# -- steps that wait for memory


PAGE_TOKENS = 16
#: Steps that are short against the time that a pool has for an answer.
QUICK = dataclasses.replace(SECONDS, step=1e-4, weights=0.0, token=0.0, map_page=0.0)
LAYOUT = plan_layout(1, 1, 64, "float32", 4096, page_tokens=PAGE_TOKENS, block_tokens=8)


@pytest.fixture
def lent() -> Iterator[SimulatedEngine]:
    """An engine that is lent 4 pages of 8, and has two requests of 4 pages each."""
    config = SimulationConfig(
        layout=LAYOUT,
        limit_bytes=8 * LAYOUT.total_page_bytes,
        profile=QUICK,
        max_model_len=4 * PAGE_TOKENS,
        max_num_seqs=2,
        watermark=0.0,
        regime="paged",
        mapper="off",
        check_every=1,
    )
    with SimulatedEngine(config) as sim:
        order(sim, 4)
        for name in "ab":
            sim.add(Asked(name=name, prompt=(ord(name),) * PAGE_TOKENS, outputs=(2 * PAGE_TOKENS,)))
        yield sim


def order(sim: SimulatedEngine, num_pages: int) -> None:
    sim.engine.lend(num_pages * LAYOUT.total_page_bytes, reclaim=False)
    sim.engine.memory_news()


def step_until_short(sim: SimulatedEngine) -> None:
    """Step until one computes nothing, as memory may come; the pool hears of each."""
    for _ in range(60):
        sim.engine.memory_news()
        sim.step()
        if sim.engine.awaits_memory:
            return
    raise AssertionError("no step waited")


def test_a_step_waits_for_memory_that_a_pool_may_lend(lent: SimulatedEngine) -> None:
    step_until_short(lent)
    num_steps = len(lent.run.steps)
    lent.step()
    assert (len(lent.run.steps), lent.scheduler.totals.preemptions) == (num_steps, 0)
    [*_, (wanted, _)] = lent.engine.memory_news()
    assert wanted.is_short
    assert wanted.wanted_bytes > 4 * LAYOUT.total_page_bytes
    order(lent, 8)
    lent.step()
    assert len(lent.run.steps) == num_steps + 1
    replay(lent, [])
    assert lent.scheduler.totals.preemptions == 0


def test_a_step_that_has_waited_in_vain_preempts(lent: SimulatedEngine) -> None:
    step_until_short(lent)
    lent.now += 1.0
    lent.step()
    assert not lent.engine.awaits_memory
    assert lent.scheduler.totals.preemptions == 1
    replay(lent, [])
    assert [record.end for record in lent.run.requests] == ["finished"] * 2


def test_memory_of_its_own_is_not_waited_for() -> None:
    lease = Engine().lease
    lease.is_lent = False
    assert not lease.may_come()
    assert not lease.may_come(is_last_resort=True)
    assert lease.take_news(is_idle=True) == []
