"""Who takes running places from others: counted in steps, never in time."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from tests.scheduler.fake_memory import CountingMemory
from tests.scheduler.test_fcfs import make_request, run, shape
from vmserve.scheduler.claims import Claim
from vmserve.scheduler.fairness import TenantShares
from vmserve.scheduler.fcfs import FCFSScheduler, SchedulerLimits
from vmserve.scheduler.sequence import Request, Sequence


def of(
    tenant: str, name: str, num_prompt: int = 4, *, max_tokens: int = 4, n: int = 1, rank: int = 0
) -> Request:
    request = make_request(name, num_prompt, max_tokens=max_tokens, n=n)
    request.tenant, request.rank = tenant, rank
    return request


class Fair:
    """A scheduler with fair sharing over a memory that counts."""

    def __init__(self, seqs: int, *, pages: int = 4096, budget: int = 64, fair: bool = True):
        self.memory = CountingMemory(pages, num_slots=4 * seqs)
        self.requests: list[Request] = []
        limits = SchedulerLimits(seqs, budget, 0.0)
        self.scheduler = FCFSScheduler(self.memory, limits, shares=TenantShares() if fair else None)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.requests.append(request)

    @property
    def unfinished(self) -> list[Sequence]:
        return [seq for each in self.requests if not each.finished for seq in each.sequences]

    def step(self) -> list[tuple[str, int, int]]:
        return shape(run(self.scheduler, self.memory))

    def steps_until(self, request: Request, most: int = 10_000) -> int:
        for num in range(1, most):
            self.step()
            if request.finished:
                return num
        raise AssertionError(f"{request.request_id} has not ended after {most} steps")

    @property
    def running(self) -> list[str]:
        """The tenants of those that run, in order."""
        return [seq.request.tenant for seq in self.scheduler._running]

    @property
    def num_claimed(self) -> int:
        return self.scheduler.totals.fairness_preemptions


def test_a_flood_of_choices_delays_one_token_of_another_tenant_by_a_step() -> None:
    engine = Fair(64, pages=1 << 14, budget=512)
    flood = of("flood", "flood", max_tokens=500, n=128)
    engine.add(flood)
    for _ in range(60):
        engine.step()
    assert engine.running == ["flood"] * 64
    other = of("other", "other", max_tokens=1)
    engine.add(other)
    assert engine.steps_until(other) == 1
    assert engine.num_claimed == 1
    assert engine.steps_until(flood) == 939  # 128 x 500 tokens at 64 places: 1,000 steps in all
    assert engine.num_claimed == 1


@pytest.mark.parametrize("budget", [64, 512])
def test_a_flood_of_long_prompts_leaves_half_of_the_chunk(budget: int) -> None:
    engine = Fair(64, budget=budget)
    engine.add(*(of("flood", f"flood-{i}", 3000) for i in range(64)))
    for _ in range(3):
        engine.step()
    other = of("other", "other", budget // 2, max_tokens=1)
    engine.add(other)
    assert engine.steps_until(other) == 1
    # A longer prompt gets as much in every step.
    longer = of("other", "longer", 4 * budget, max_tokens=1)
    engine.add(longer)
    chunks = [{name: num for name, _, num in engine.step()}["longer"] for _ in range(4)]
    assert chunks == [budget // 2] * 4


def test_a_flood_that_fills_the_memory_gives_pages_back() -> None:
    engine = Fair(64, pages=40, budget=512)
    engine.add(*(of("flood", f"flood-{i}", 30, max_tokens=60) for i in range(20)))
    for _ in range(5):
        engine.step()
    other = of("other", "other", 40, max_tokens=1)
    engine.add(other)
    assert engine.steps_until(other) == 1
    assert "flood" in engine.running


def test_two_floods_end_with_half_of_the_places_each_and_stay_so() -> None:
    engine = Fair(8)
    engine.add(of("first", "first", max_tokens=200, n=16))
    for _ in range(3):
        engine.step()
    engine.add(of("second", "second", max_tokens=200, n=16))
    for _ in range(8):
        engine.step()
    assert sorted(engine.running) == ["first"] * 4 + ["second"] * 4
    claimed = engine.num_claimed
    assert claimed == 4
    for _ in range(100):
        engine.step()
        assert sorted(engine.running) == ["first"] * 4 + ["second"] * 4
    assert engine.num_claimed == claimed


def test_a_tenant_takes_one_place_in_a_step() -> None:
    """Whoever sends a handful of short requests does not have the flood's work thrown away."""
    engine = Fair(8)
    engine.add(of("flood", "flood", max_tokens=200, n=8))
    for _ in range(3):
        engine.step()
    engine.add(*(of("other", f"other-{i}", max_tokens=2) for i in range(4)))
    counts = []
    for _ in range(3):
        engine.step()
        counts.append(engine.num_claimed)
    assert counts == [1, 2, 2]


def test_one_place_is_not_passed_to_and_fro() -> None:
    engine = Fair(1)
    first, second = of("a", "a", max_tokens=20), of("b", "b", max_tokens=20)
    engine.add(first)
    engine.step()
    engine.add(second)
    assert engine.steps_until(second) == 39
    assert engine.num_claimed == 0


def test_who_has_had_more_tokens_claims_nothing() -> None:
    engine = Fair(4)
    engine.add(of("flood", "flood", max_tokens=100, n=4))
    for _ in range(3):
        engine.step()
    engine.add(of("reader", "long", 500, max_tokens=1))
    for _ in range(12):
        engine.step()
    assert engine.num_claimed == 1
    engine.add(of("reader", "next", max_tokens=1))
    engine.step()
    assert engine.num_claimed == 1


def test_who_is_at_or_below_the_mean_is_no_victim() -> None:
    engine = Fair(9)
    engine.add(of("small", "small", max_tokens=100, n=2), of("large", "large", max_tokens=100, n=9))
    for _ in range(3):
        engine.step()
    assert sorted(engine.running) == ["large"] * 7 + ["small"] * 2
    engine.add(of("third", "third", max_tokens=100, n=4))
    for _ in range(10):
        engine.step()
        assert engine.running.count("small") == 2
    assert (engine.running.count("large"), engine.running.count("third")) == (4, 3)


def test_memory_that_is_short_is_taken_from_the_tenant_with_most_places() -> None:
    """The flood grows: who came last is another tenant, and goes on."""
    engine = Fair(8, pages=16, budget=64)
    engine.add(*(of("flood", f"flood-{i}", 6, max_tokens=30) for i in range(5)))
    engine.step()
    other = of("other", "other", 6, max_tokens=12)
    engine.add(other)
    assert engine.steps_until(other) == 12
    assert other.metrics.num_preemptions == 0
    assert engine.scheduler.totals.preemptions > 0


def test_without_fair_sharing_nobody_gives_way() -> None:
    engine = Fair(4, fair=False)
    engine.add(of("flood", "flood", max_tokens=50, n=8))
    engine.step()
    other = of("other", "other", max_tokens=1)
    engine.add(other)
    assert engine.steps_until(other) > 50
    assert engine.num_claimed == 0


def test_a_step_that_is_planned_ahead_preempts_nobody() -> None:
    """It is refused, and the next one, planned when the last has ended, meets the claim."""
    engine = Fair(4)
    engine.add(of("flood", "flood", max_tokens=50, n=4))
    for _ in range(3):
        engine.step()
    engine.add(of("other", "other", max_tokens=1))
    assert engine.scheduler.schedule(ahead=True) is None
    assert engine.num_claimed == 0
    assert "other" in [name for name, _, _ in engine.step()]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.slow
def test_whatever_tenants_send_victims_have_more_than_their_share(seed: int) -> None:
    rng = random.Random(seed)
    engine = Fair(rng.randint(2, 12), pages=rng.choice([40, 80, 4096]), budget=rng.choice([16, 64]))
    find = engine.scheduler._claims.find

    def checked() -> Claim | None:
        claim = find()
        if claim is None:
            return None
        places = Counter(engine.running)
        for granted in engine.scheduler._claims.granted:
            places[granted.request.tenant] += 1
        num_tenants = len({seq.request.tenant for seq in engine.unfinished})
        claimant = claim.sequence.request.tenant
        for [victim], reason in claim.victims:
            tenant = victim.request.tenant
            assert reason == "fairness"
            assert places[tenant] * num_tenants > places.total()
            places[tenant] -= 1
            assert places[tenant] > places[claimant]
        return claim

    engine.scheduler._claims.find = checked  # type: ignore[method-assign]
    num_sequences = 0
    for index in range(rng.randint(3, 12)):
        n = rng.choice([1, 1, 4, 20])
        engine.add(
            of(
                rng.choice("abcd"),
                f"r{index}",
                rng.randint(1, 60),
                max_tokens=rng.randint(1, 40),
                n=n,
            )
        )
        num_sequences += n
        for _ in range(rng.randint(0, 20)):
            if engine.unfinished:
                engine.step()
    for _ in range(20_000):
        if not engine.unfinished:
            break
        engine.step()
    assert not engine.unfinished
    assert engine.num_claimed <= num_sequences


# -- priorities


def test_an_urgent_request_takes_the_place_of_the_last_one_of_lower_priority() -> None:
    engine = Fair(4, fair=False)
    engine.add(*(of("", f"low-{i}", max_tokens=50, rank=2) for i in range(4)))
    for _ in range(3):
        engine.step()
    urgent = of("", "urgent", max_tokens=1, rank=0)
    engine.add(urgent, of("", "same", max_tokens=1, rank=2))
    names = [name for name, _, _ in engine.step()]
    assert names == ["low-0", "low-1", "low-2", "urgent"]
    assert urgent.finished
    # And its place is the victim's again.
    assert [name for name, _, _ in engine.step()][-1] == "low-3"
    assert engine.scheduler.totals.priority_preemptions == 1


def test_urgent_requests_all_begin_in_the_next_step() -> None:
    engine = Fair(4, fair=False)
    engine.add(*(of("", f"low-{i}", 4, max_tokens=50, rank=1) for i in range(4)))
    engine.step()
    engine.add(*(of("", f"urgent-{i}", 4, max_tokens=9) for i in range(3)))
    assert [name for name, _, _ in engine.step()] == ["low-0", "urgent-0", "urgent-1", "urgent-2"]


def test_an_urgent_prompt_is_read_before_others_that_have_begun() -> None:
    engine = Fair(4, fair=False, budget=16)
    engine.add(of("", "low", 100, max_tokens=2, rank=1))
    engine.step()
    engine.add(of("", "urgent", 20, max_tokens=2))
    assert engine.step() == [("urgent", 0, 16)]
    assert engine.step() == [("urgent", 16, 4), ("low", 16, 12)]


class Aged(Fair):
    """By priority, with a clock that moves by a second in each step."""

    def __init__(self, seqs: int, max_wait: float) -> None:
        super().__init__(seqs, fair=False)
        self.now = 0.0
        self.numbers = itertools.count()
        limits = SchedulerLimits(seqs, 64, 0.0, priority_max_wait=max_wait)
        self.scheduler = FCFSScheduler(self.memory, limits, clock=lambda: self.now)

    def add(self, *requests: Request) -> None:
        for request in requests:
            request.metrics.arrival_time = self.now
        super().add(*requests)

    def step(self) -> list[tuple[str, int, int]]:
        self.now += 1
        return super().step()

    def steps_beside_urgent(self, num_steps: int, *watched: Request) -> list[int]:
        """More urgent requests than there are places for; when the watched ones ended."""
        ended = [0] * len(watched)
        for step in range(num_steps):
            while sum(seq.rank == -5 for seq in self.scheduler._waiting) < 8:
                self.add(of("", f"urgent-{next(self.numbers)}", rank=-5))
            self.step()
            for index, request in enumerate(watched):
                if request.finished and not ended[index]:
                    ended[index] = step + 1
        return ended


def test_a_low_priority_beside_endless_urgent_requests_runs_after_its_time() -> None:
    engine = Aged(4, max_wait=100)
    low = of("", "low", max_tokens=8, rank=9)
    engine.add(low)
    [ended] = engine.steps_beside_urgent(300, low)
    # 100 steps, a sixteenth until it is noticed, a place, and 8 tokens.
    assert 100 < ended <= 100 + 7 + 4 + 8
    never = Aged(4, max_wait=1e9)
    low = of("", "low", max_tokens=8, rank=9)
    never.add(low)
    assert never.steps_beside_urgent(3000, low) == [0]


def test_those_that_have_waited_for_long_leave_three_quarters_to_the_urgent() -> None:
    engine = Aged(8, max_wait=20)
    engine.add(*(of("", f"low-{i}", max_tokens=50, rank=9) for i in range(40)))
    for _ in range(200):
        engine.steps_beside_urgent(1)
        low = [seq for seq in engine.scheduler._running if seq.request.rank == 9]
        assert len(low) <= 2
        assert all(seq.is_raised for seq in low)
    # Two at a time, 50 tokens each.
    assert engine.scheduler.totals.raised == 2 * 4


def test_who_is_raised_is_not_preempted_by_urgent_requests() -> None:
    engine = Aged(2, max_wait=10)
    engine.add(*(of("", f"first-{i}", max_tokens=30, rank=0) for i in range(2)))
    low = of("", "low", max_tokens=30, rank=9)
    engine.add(low)
    for _ in range(33):
        engine.step()
    assert low.sequences[0] in engine.scheduler._running
    engine.add(*(of("", f"urgent-{i}", max_tokens=30, rank=-5) for i in range(4)))
    engine.step()
    assert [seq.rank for seq in engine.scheduler._running] == [low.sequences[0].rank, -5]
    assert engine.steps_until(low) < 30
    assert low.metrics.num_preemptions == 0
