"""What an engine gives back of the memory that a pool lends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.simulation.test_engine import SECONDS
from vmserve.engine.lease import Lease
from vmserve.memory.base import Shortfall
from vmserve.memory.layout import plan_layout
from vmserve.pool.shares import Holding
from vmserve_bench.simulation import Asked, SimulatedEngine, SimulationConfig

PAGE = 1 << 16
MARGIN = 1 + 2 + 1  # pages: one, one for each running sequence, a 64th of the limit


class Engine:
    """As much of an engine as a lease sees: 100 pages, 2 running sequences."""

    def __init__(self) -> None:
        self.now = 50.0
        self.used = 0
        self.limit_bytes = 100 * PAGE
        self.layout = SimpleNamespace(total_page_bytes=PAGE)
        scheduler = SimpleNamespace(
            num_running=2, num_waiting=0, awaits_memory=False, give_way=self.preempt
        )
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


def lent_engine(num_pages: int, **options: Any) -> SimulatedEngine:
    """An engine whose pool lends it so many pages."""
    given: dict[str, Any] = {
        "limit_bytes": 8 * LAYOUT.total_page_bytes,
        "max_model_len": 4 * PAGE_TOKENS,
        "max_num_seqs": 2,
    }
    config = SimulationConfig(
        layout=LAYOUT,
        profile=QUICK,
        watermark=0.0,
        regime="paged",
        mapper="off",
        check_every=1,
        **given | options,
    )
    sim = SimulatedEngine(config)
    order(sim, num_pages)
    return sim


def prompt(name: str, num_pages: int, output_pages: int, **options: Any) -> Asked:
    tokens = (ord(name),) * (num_pages * PAGE_TOKENS)
    return Asked(name=name, prompt=tokens, outputs=(output_pages * PAGE_TOKENS,), **options)


@pytest.fixture
def lent() -> Iterator[SimulatedEngine]:
    """One that is lent 4 pages of 8, and has two requests of 4 pages each."""
    with lent_engine(4) as sim:
        for name in "ab":
            sim.add(prompt(name, 1, 2))
        yield sim


def order(sim: SimulatedEngine, num_pages: int) -> None:
    sim.engine.lend(num_pages * LAYOUT.total_page_bytes, reclaim=False)
    sim.engine.memory_news()


def step(sim: SimulatedEngine) -> list[Holding]:
    """One step as a service makes it, which hears the engine after it and before the next."""
    sim.step()
    news = [holding for _ in range(2) for holding, _ in sim.engine.memory_news()]
    if sim.engine.awaits_memory:
        sim.now += 0.01
    return news


def step_until_short(sim: SimulatedEngine) -> list[Holding]:
    """Step until one computes nothing, as memory may come; returns what was reported."""
    news = []
    for _ in range(60):
        news += step(sim)
        if sim.engine.awaits_memory:
            return news
    raise AssertionError("no step waited")


def serve(sim: SimulatedEngine, most_steps: int) -> dict[str, str]:
    """Step while there is something to run; returns how requests have ended."""
    for _ in range(most_steps):
        if not sim.has_unfinished:
            return {record.name: record.end for record in sim.run.requests}
        step(sim)
    raise AssertionError(f"{sim.open_names} have not ended at {sim.now:.1f} s")


def test_a_step_waits_for_memory_that_a_pool_may_lend(lent: SimulatedEngine) -> None:
    wanted = step_until_short(lent)[-1]
    num_steps = len(lent.run.steps)
    assert wanted.is_short
    assert wanted.wanted_bytes > 4 * LAYOUT.total_page_bytes
    assert step(lent) == []  # that is known
    assert (len(lent.run.steps), lent.scheduler.totals.preemptions) == (num_steps, 0)
    order(lent, 8)
    step(lent)
    assert len(lent.run.steps) == num_steps + 1
    assert serve(lent, 60) == {"a": "finished", "b": "finished"}
    assert lent.scheduler.totals.preemptions == 0


def test_a_step_that_has_waited_in_vain_preempts(lent: SimulatedEngine) -> None:
    step_until_short(lent)
    began = lent.now
    while not lent.scheduler.totals.preemptions:
        step(lent)
    assert 0.03 < lent.now - began < 0.07
    assert serve(lent, 120) == {"a": "finished", "b": "finished"}


def test_a_request_that_no_pool_has_room_for_fails() -> None:
    with lent_engine(4, max_num_seqs=8) as sim:
        sim.add(prompt("a", 1, 2, beam_width=6))
        assert serve(sim, 400) == {"a": "failed"}
        assert 2.0 < sim.now < 2.5
        sim.add(prompt("b", 1, 2))
        assert serve(sim, 100)["b"] == "finished"


def test_prompts_whose_memory_is_recalled_go_on_one_after_the_other() -> None:
    """What they are owed is more than there is, though the next step's pages are there."""
    options = {"limit_bytes": 200 * LAYOUT.total_page_bytes, "max_model_len": 64 * PAGE_TOKENS}
    with lent_engine(130, **options, max_num_batched_tokens=24 * PAGE_TOKENS) as sim:
        for name in "ab":
            sim.add(prompt(name, 40, 2))
        step(sim)
        step(sim)
        order(sim, 66)
        assert serve(sim, 400) == {"a": "finished", "b": "finished"}
        assert sim.scheduler.totals.preemptions == 1


def test_no_pool_is_asked_for_mappings(
    lent: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(lent)
    lacks = Shortfall(1, 8, needed_mappings=10, available_mappings=2)
    with monkeypatch.context() as patch:
        patch.setattr(lent.memory, "plan", lambda *_: lacks)
        assert not any(holding.is_short for holding in step(lent))
    assert not lent.engine.awaits_memory


def test_what_waited_for_memory_may_be_aborted(lent: SimulatedEngine) -> None:
    step_until_short(lent)
    for name in "ab":
        lent.abort(name)
    assert not lent.engine.awaits_memory
    lent.add(prompt("c", 1, 2))
    assert serve(lent, 60)["c"] == "finished"


def test_memory_of_its_own_is_not_waited_for() -> None:
    lease = Engine().lease
    lease.is_lent = False
    assert not lease.may_come()
    assert not lease.may_come(is_last_resort=True)
    assert lease.take_news(is_idle=True) == []
