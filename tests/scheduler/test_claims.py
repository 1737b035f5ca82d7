"""Who takes running places from others: counted in steps, never in time."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from tests.support.scheduling import Steps, make_request, shape
from vmserve.scheduler.fairness import TenantShares
from vmserve.scheduler.sequence import Request


class Fair(Steps):
    """With fair sharing."""

    def __init__(self, seqs: int, pages: int = 4096, *, fair: bool = True, **how: Any) -> None:
        shares = TenantShares() if fair else None
        super().__init__(pages, seqs=seqs, num_slots=4 * seqs, shares=shares, **how)

    def come(self, tenant: str, num_prompt: int = 4, *, count: int = 1, **how: Any) -> Request:
        """Requests of a tenant; returns the last one."""
        for _ in range(count):
            name = f"{tenant}-{len(self.requests)}"
            request = make_request(name, num_prompt, tenant=tenant, **how)
            self.add(request)
        return request

    @property
    def num_claimed(self) -> int:
        return self.scheduler.totals.fairness_preemptions


def test_a_flood_of_choices_delays_one_token_of_another_tenant_by_a_step() -> None:
    engine = Fair(64, 1 << 14, budget=512)
    flood = engine.come("flood", max_tokens=500, n=128)
    engine.steps(60)
    assert engine.running == ["flood"] * 64
    assert engine.steps_until(engine.come("other", max_tokens=1)) == 1
    assert engine.num_claimed == 1
    assert engine.steps_until(flood) == 939  # 128 x 500 tokens at 64 places: 1,000 steps in all
    assert engine.num_claimed == 1


@pytest.mark.parametrize("budget", [64, 512])
def test_a_flood_of_long_prompts_leaves_half_of_the_chunk(budget: int) -> None:
    engine = Fair(64, budget=budget)
    engine.come("flood", 3000, count=64)
    engine.steps(3)
    assert engine.steps_until(engine.come("other", budget // 2, max_tokens=1)) == 1
    # A longer prompt gets as much in every step.
    longer = engine.come("other", 4 * budget, max_tokens=1).request_id
    for _ in range(4):
        engine.step()
        assert {name: num for name, _, num in shape(engine.last)}[longer] == budget // 2


def test_a_flood_that_fills_the_memory_gives_pages_back() -> None:
    engine = Fair(64, 40, budget=512)
    engine.come("flood", 30, max_tokens=60, count=20)
    engine.steps(5)
    assert engine.steps_until(engine.come("other", 40, max_tokens=1)) == 1
    assert "flood" in engine.running


def test_two_floods_end_with_half_of_the_places_each_and_stay_so() -> None:
    engine = Fair(8)
    engine.come("first", max_tokens=200, n=16)
    engine.steps(3)
    engine.come("second", max_tokens=200, n=16)
    engine.steps(8)
    assert engine.num_claimed == 4
    for _ in range(100):
        assert sorted(engine.running) == ["first"] * 4 + ["second"] * 4
        engine.step()
    assert engine.num_claimed == 4


def test_a_tenant_takes_one_place_in_a_step() -> None:
    """Whoever sends a handful of short requests does not have the flood's work thrown away."""
    engine = Fair(8)
    engine.come("flood", max_tokens=200, n=8)
    engine.steps(3)
    engine.come("other", max_tokens=2, count=4)
    assert [(engine.step(), engine.num_claimed)[1] for _ in range(3)] == [1, 2, 2]


def test_one_place_is_not_passed_to_and_fro() -> None:
    engine = Fair(1)
    engine.come("a", max_tokens=20)
    engine.step()
    assert engine.steps_until(engine.come("b", max_tokens=20)) == 39
    assert engine.num_claimed == 0


def test_who_has_had_more_tokens_claims_nothing() -> None:
    engine = Fair(4)
    engine.come("flood", max_tokens=100, n=4)
    engine.steps(3)
    engine.come("reader", 500, max_tokens=1)
    engine.steps(12)
    assert engine.num_claimed == 1
    engine.come("reader", max_tokens=1)
    engine.step()
    assert engine.num_claimed == 1


def test_who_is_at_or_below_the_mean_is_no_victim() -> None:
    engine = Fair(9)
    engine.come("small", max_tokens=100, n=2)
    engine.come("large", max_tokens=100, n=9)
    engine.steps(3)
    assert Counter(engine.running) == {"large": 7, "small": 2}
    engine.come("third", max_tokens=100, n=4)
    for _ in range(10):
        engine.step()
        assert engine.running.count("small") == 2
    assert Counter(engine.running) == {"large": 4, "third": 3, "small": 2}


def test_memory_that_is_short_is_taken_from_the_tenant_with_most_places() -> None:
    """The flood grows: who came last is another tenant, and goes on."""
    engine = Fair(8, 16)
    engine.come("flood", 6, max_tokens=30, count=5)
    engine.step()
    other = engine.come("other", 6, max_tokens=12)
    assert engine.steps_until(other) == 12
    assert other.metrics.num_preemptions == 0
    assert engine.scheduler.totals.preemptions > 0


def test_without_fair_sharing_nobody_gives_way() -> None:
    engine = Fair(4, fair=False)
    engine.come("flood", max_tokens=50, n=8)
    engine.step()
    assert engine.steps_until(engine.come("other", max_tokens=1)) > 50
    assert engine.num_claimed == 0


def test_a_step_that_is_planned_ahead_preempts_nobody() -> None:
    """It is refused, and the next one, planned when the last has ended, meets the claim."""
    engine = Fair(4)
    engine.come("flood", max_tokens=50, n=4)
    engine.steps(3)
    engine.come("other", max_tokens=1)
    assert engine.scheduler.schedule(ahead=True) is None
    assert engine.num_claimed == 0
    assert "other" in engine.step()


# -- priorities


def ranked(rank: int, *names: str, num_prompt: int = 4, max_tokens: int = 50) -> list[Request]:
    return [make_request(name, num_prompt, max_tokens=max_tokens, rank=rank) for name in names]


def test_an_urgent_request_takes_the_place_of_the_last_one_of_lower_priority() -> None:
    engine = Fair(4, fair=False)
    engine.add(*ranked(2, "low-0", "low-1", "low-2", "low-3"))
    engine.steps(3)
    [urgent] = ranked(0, "urgent", max_tokens=1)
    engine.add(urgent, *ranked(2, "same", max_tokens=1))
    engine.step()
    assert engine.names == ["low-0", "low-1", "low-2", "urgent"]
    assert urgent.finished
    # And its place is the victim's again.
    engine.step()
    assert engine.names[-1] == "low-3"
    assert engine.scheduler.totals.priority_preemptions == 1


def test_urgent_requests_all_begin_in_the_next_step() -> None:
    engine = Fair(4, fair=False)
    engine.add(*ranked(1, "low-0", "low-1", "low-2", "low-3"))
    engine.step()
    engine.add(*ranked(0, "urgent-0", "urgent-1", "urgent-2"))
    engine.step()
    assert engine.names == ["low-0", "urgent-0", "urgent-1", "urgent-2"]


def test_an_urgent_prompt_is_read_before_others_that_have_begun() -> None:
    engine = Fair(4, fair=False, budget=16)
    engine.add(*ranked(1, "low", num_prompt=100))
    engine.step()
    engine.add(*ranked(0, "urgent", num_prompt=20))
    assert engine.steps(2) == "urgent 0+16 | urgent 16+4, low 16+12"


class Aged(Fair):
    """By priority, with a clock that moves by a second in each step."""

    def __init__(self, seqs: int, max_wait: float) -> None:
        self.now = 0.0
        self.numbers = itertools.count()
        clock = lambda: self.now  # noqa: E731
        super().__init__(seqs, fair=False, priority_max_wait=max_wait, clock=clock)

    def add(self, *requests: Request) -> None:
        for request in requests:
            request.metrics.arrival_time = self.now
        super().add(*requests)

    def step(self) -> str:
        self.now += 1
        return super().step()

    def steps_beside_urgent(self, num_steps: int, watched: Request | None = None) -> int:
        """More urgent requests than there are places for; when the watched one ended, or 0."""
        ended = 0
        for step in range(num_steps):
            while sum(seq.rank == -5 for seq in self.scheduler._waiting) < 8:
                self.add(*ranked(-5, f"urgent-{next(self.numbers)}", max_tokens=4))
            self.step()
            if watched is not None and watched.finished and not ended:
                ended = step + 1
        return ended


def test_a_low_priority_beside_endless_urgent_requests_runs_after_its_time() -> None:
    for max_wait, num_steps in ((100, 300), (1e9, 3000)):
        engine = Aged(4, max_wait)
        [low] = ranked(9, "low", max_tokens=8)
        engine.add(low)
        ended = engine.steps_beside_urgent(num_steps, low)
        # 100 steps, a sixteenth until it is noticed, a place, and 8 tokens.
        assert 100 < ended <= 100 + 7 + 4 + 8 if max_wait == 100 else ended == 0


def test_those_that_have_waited_for_long_leave_three_quarters_to_the_urgent() -> None:
    engine = Aged(8, max_wait=20)
    engine.add(*ranked(9, *(f"low-{i}" for i in range(40))))
    for _ in range(200):
        engine.steps_beside_urgent(1)
        low = [seq for seq in engine.scheduler._running if seq.request.rank == 9]
        assert len(low) <= 2
        assert all(seq.is_raised for seq in low)
    # Two at a time, 50 tokens each.
    assert engine.scheduler.totals.raised == 2 * 4


def test_who_is_raised_is_not_preempted_by_urgent_requests() -> None:
    engine = Aged(2, max_wait=10)
    engine.add(*ranked(0, "first-0", "first-1", max_tokens=30))
    [low] = ranked(9, "low", max_tokens=30)
    engine.add(low)
    engine.steps(33)
    assert low.sequences[0] in engine.scheduler._running
    engine.add(*ranked(-5, *(f"urgent-{i}" for i in range(4)), max_tokens=30))
    engine.step()
    assert [seq.rank for seq in engine.scheduler._running] == [low.sequences[0].rank, -5]
    assert engine.steps_until(low) < 30
    assert low.metrics.num_preemptions == 0
