"""Tenants share by the tokens that they have had."""

from __future__ import annotations

from tests.scheduler.fake_memory import CountingMemory
from tests.scheduler.test_fcfs import make_request, run, shape
from vmserve.scheduler.fairness import TenantShares
from vmserve.scheduler.fcfs import FCFSScheduler, SchedulerLimits
from vmserve.scheduler.sequence import Request


def of(
    tenant: str, name: str, num_prompt: int = 4, *, rank: int = 0, max_tokens: int = 4
) -> Request:
    request = make_request(name, num_prompt, max_tokens=max_tokens)
    request.tenant, request.rank = tenant, rank
    return request


def fair(seqs: int) -> FCFSScheduler:
    limits = SchedulerLimits(seqs, 64, 0.0)
    return FCFSScheduler(CountingMemory(64), limits, shares=TenantShares())


def order_of_service(scheduler: FCFSScheduler) -> list[str]:
    """Who was admitted, in order, when one runs at a time."""
    memory, seen = scheduler._memory, []
    while (plan := run(scheduler, memory)) is not None:  # type: ignore[arg-type]
        for name, _, _ in shape(plan):
            if name not in seen:
                seen.append(name)
    return seen


def test_a_flood_does_not_hold_up_the_others() -> None:
    scheduler = fair(1)
    for index in range(4):
        scheduler.add(of("flood", f"f{index}"))
    scheduler.add(of("other", "o0"))
    scheduler.add(of("other", "o1"))
    assert order_of_service(scheduler) == ["f0", "o0", "f1", "o1", "f2", "f3"]


def test_without_shares_it_is_first_come_first_served() -> None:
    scheduler = FCFSScheduler(CountingMemory(64), SchedulerLimits(1, 64, 0.0))
    for request in (of("flood", "f0"), of("flood", "f1"), of("other", "o0")):
        scheduler.add(request)
    assert order_of_service(scheduler) == ["f0", "f1", "o0"]


def test_generated_tokens_count_twice() -> None:
    shares = TenantShares()
    first, second = of("a", "a"), of("b", "b")
    shares.arrived(first)
    shares.arrived(second)
    shares.served(first, num_read=10)
    shares.served(second, num_generated=6)
    assert shares.tokens == {"a": 10.0, "b": 12.0}
    assert shares.next_of([second.sequences[0], first.sequences[0]]) is first.sequences[0]


def test_staying_away_saves_nothing_up() -> None:
    shares = TenantShares()
    busy, late = of("busy", "x"), of("late", "y")
    shares.arrived(busy)
    shares.served(busy, num_read=1000)
    shares.arrived(late)
    assert shares.tokens == {"busy": 1000.0, "late": 1000.0}
    # And having been served is not forgotten while the others are there.
    shares.served(late, num_read=500)
    shares.left(late)
    shares.left(late)
    again = of("late", "z")
    shares.arrived(again)
    assert shares.tokens == {"busy": 1000.0, "late": 1500.0}


def test_priorities_come_before_shares() -> None:
    scheduler = fair(1)
    scheduler.add(of("a", "a0"))
    scheduler.add(of("a", "a1", rank=0))
    scheduler.add(of("b", "b0", rank=1))
    assert order_of_service(scheduler) == ["a0", "a1", "b0"]


def test_nobody_starves_beside_a_tenant_with_many_short_requests() -> None:
    """Both always have something waiting: tokens served stay within one request of each other."""
    scheduler = fair(2)
    memory = scheduler._memory
    for index in range(30):
        scheduler.add(of("short", f"s{index}", 4, max_tokens=2))
        scheduler.add(of("long", f"l{index}", 20, max_tokens=12))
    largest = 20 + 2 * 12
    for _ in range(60):
        assert run(scheduler, memory) is not None  # type: ignore[arg-type]
        had = scheduler._shares.tokens  # type: ignore[union-attr]
        if len(had) == 2:
            assert abs(had["short"] - had["long"]) <= 2 * largest
