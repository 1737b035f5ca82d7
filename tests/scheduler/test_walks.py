"""Random walks over pairs of what a scheduler may have: everybody ends, and nothing is left."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from tests.lives.pairs import Row, covering_rows
from tests.scheduler.fake_memory import CountingMemory
from tests.scheduler.test_copies import LateMemory
from tests.support.scheduling import Steps, make_request
from vmserve.memory.base import Regime
from vmserve.scheduler.claims import Claim
from vmserve.scheduler.fairness import TenantShares
from vmserve.scheduler.preemption import PreemptionPolicy

AXES: dict[str, list[Any]] = {
    "pages": [6, 13, 20, 40, 4096],
    "seqs": [1, 2, 6, 12],
    "num_slots": [2, 8, 48],
    "budget": [6, 16, 40, 64],
    "max_pairs": [None, 400],
    "preemption": ["recompute", "swap"],
    "tenants": ["a", "abcd"],
    "ranks": [(0,), (0, 0, 1)],
    "most_choices": [1, 5, 20],
    "abort": [0.0, 0.1],
    "convert": [0.0, 0.2],
}
ROWS = covering_rows(AXES, lambda row: True, seed=1)


def check_claims(steps: Steps) -> None:
    """A tenant has more than its share, and more than the claimant, where it gives a place up."""
    claims = steps.scheduler._claims
    find = claims.find

    def checked() -> Claim | None:
        if (claim := find()) is None:
            return None
        places = Counter(steps.running)
        places.update(each.request.tenant for each in claims.granted)
        num_tenants = len({each.tenant for each in steps.requests if not each.finished})
        claimant = claim.sequence.request.tenant
        for [victim], reason in claim.victims:
            if reason == "fairness":
                assert places[victim.request.tenant] * num_tenants > places.total()
                places[victim.request.tenant] -= 1
                assert places[victim.request.tenant] > places[claimant]
        return claim

    claims.find = checked  # type: ignore[method-assign]


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_every_request_ends_whatever_the_mix(number: int) -> None:
    """Random sizes, arrivals, aborts and conversions; a swap's copies end at any time."""
    row: Row = dict(ROWS[number])
    rng, tenants, ranks = random.Random(number), row.pop("tenants"), row.pop("ranks")
    most_choices, abort, convert = (row.pop(each) for each in ("most_choices", "abort", "convert"))
    row["preemption"] = PreemptionPolicy(policy := row["preemption"])
    memory = LateMemory if policy == "swap" else CountingMemory
    steps = Steps(memory=memory, shares=TenantShares() if len(tenants) > 1 else None, **row)
    check_claims(steps)
    longest = min(steps.memory.max_len, 160)
    for step in range(8_000):
        if step < 60:
            size, n = rng.randint(1, longest // 2), rng.choice([1, 1, most_choices])
            how = {"tenant": rng.choice(tenants), "rank": rng.choice(ranks), "n": n}
            most = rng.randint(1, min(40, longest - size))
            steps.add(make_request(f"{step}", size, max_tokens=most, **how))
        if rng.random() < abort:
            steps.scheduler.abort(rng.choice(steps.requests))
        if rng.random() < convert:
            regime = rng.choice([Regime.VIRTUAL, Regime.PAGED])
            steps.scheduler.convert(rng.choice(steps.requests), regime)
        if isinstance(steps.memory, LateMemory) and step % 3 == 0:
            steps.memory.end()
        steps.step()
        if step >= 60 and steps.left == (0, 0):
            break
    assert all(request.finished for request in steps.requests)
    assert (steps.memory.page_lists, steps.memory.swapped) == ({}, {})
    num_branches = sum(request.num_branches for request in steps.requests)
    assert steps.scheduler.totals.fairness_preemptions <= num_branches
