"""Tenants share by the tokens that they have had."""

from __future__ import annotations

import pytest

from tests.support.scheduling import Steps, make_request
from vmserve.scheduler.fairness import TenantShares
from vmserve.scheduler.sequence import Request

#: (name, rank) of requests, whose tenant is the first letter.
FLOOD = [(name, 0) for name in ("f0", "f1", "f2", "f3", "o0", "o1")]


@pytest.mark.parametrize(
    ("asked", "shares", "order"),
    [
        (FLOOD, TenantShares(), "f0 o0 f1 o1 f2 f3"),
        (FLOOD, None, "f0 f1 f2 f3 o0 o1"),
        ([("a0", 0), ("a1", 0), ("b0", 1)], TenantShares(), "a0 a1 b0"),
    ],
    ids=["a flood holds nobody up", "without shares it is fcfs", "priorities come first"],
)
def test_who_is_next_when_one_runs_at_a_time(
    asked: list[tuple[str, int]], shares: TenantShares | None, order: str
) -> None:
    steps = Steps(seqs=1, shares=shares)
    steps.add(*(make_request(name, tenant=name[0], rank=rank) for name, rank in asked))
    seen: dict[str, None] = {}
    while steps.step():
        seen |= dict.fromkeys(steps.names)
    assert " ".join(seen) == order


def arrived(shares: TenantShares, tenant: str) -> Request:
    request = make_request(tenant, tenant=tenant)
    shares.arrived(request)
    return request


def test_generated_tokens_count_twice() -> None:
    shares = TenantShares()
    first, second = arrived(shares, "a"), arrived(shares, "b")
    shares.served(first, num_read=10)
    shares.served(second, num_generated=6)
    assert shares.tokens == {"a": 10.0, "b": 12.0}
    assert shares.next_of([second.sequences[0], first.sequences[0]]) is first.sequences[0]


def test_staying_away_saves_nothing_up() -> None:
    shares = TenantShares()
    shares.served(arrived(shares, "busy"), num_read=1000)
    late = arrived(shares, "late")
    assert shares.tokens == {"busy": 1000.0, "late": 1000.0}
    # And having been served is not forgotten while the others are there.
    shares.served(late, num_read=500)
    shares.left(late)
    shares.left(late)
    arrived(shares, "late")
    assert shares.tokens == {"busy": 1000.0, "late": 1500.0}


def test_nobody_starves_beside_a_tenant_with_many_short_requests() -> None:
    """Both always have something waiting: tokens served stay within one request of each other."""
    shares = TenantShares()
    steps = Steps(seqs=2, shares=shares)
    for index in range(30):
        steps.add(make_request(f"s{index}", 4, max_tokens=2, tenant="short"))
        steps.add(make_request(f"l{index}", 20, max_tokens=12, tenant="long"))
    largest = 20 + 2 * 12
    for _ in range(60):
        assert steps.step()
        if len(had := shares.tokens) == 2:
            assert abs(had["short"] - had["long"]) <= 2 * largest
