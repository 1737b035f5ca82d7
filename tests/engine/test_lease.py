"""What an engine gives back of the memory that a pool lends it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vmserve.engine.lease import Lease

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
