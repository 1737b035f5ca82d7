"""Steps of about the same length: tokens far behind others in a prompt count for more."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.fake_memory import CountingMemory
from tests.scheduler.test_fairness import of
from tests.scheduler.test_fcfs import run, shape
from vmserve.scheduler.budget import SchedulerLimits, StepBudget
from vmserve.scheduler.fairness import TenantShares
from vmserve.scheduler.fcfs import FCFSScheduler
from vmserve.scheduler.sequence import Sequence

PAIRS = 64 * 3000


def reading(num_past: int, num_prompt: int = 10_000, tenant: str = "a") -> Sequence:
    [sequence] = of(tenant, f"{tenant}{num_past}", num_prompt).sequences
    sequence.num_computed = num_past
    return sequence


def taken(budget: StepBudget, sequence: Sequence) -> int:
    return budget.take(sequence)[1] if budget.can_take(sequence) else 0


@pytest.mark.parametrize("num_past", [0, 100, 1000, 4000, 9000])
def test_a_chunk_has_so_many_pairs(num_past: int) -> None:
    """And an eighth of the step's tokens, or prompts would never end."""
    num_new = taken(StepBudget(512, 1 << 20, pairs=PAIRS), reading(num_past))
    assert num_new >= 64
    if num_new > 64:
        assert num_new == 512 or num_new * (num_past + num_new / 2) <= PAIRS
        assert (num_new + 1) * (num_past + (num_new + 1) / 2) > PAIRS or num_new == 512


def test_without_a_limit_a_chunk_is_what_there_is() -> None:
    assert taken(StepBudget(512, 1 << 20), reading(9000)) == 512


def test_what_a_tenant_has_taken_its_others_wait_for() -> None:
    """One prompt after the other, so that the next may find cached what they have in common."""
    budget = StepBudget(512, 1 << 20, pairs=PAIRS)
    assert taken(budget, reading(4000)) == 64
    assert taken(budget, reading(5)) == 0
    assert taken(budget, reading(3000)) == 0
    # Another tenant's prompt begins nevertheless, but where it is far on it waits too.
    assert taken(budget, reading(0, tenant="b")) == 77  # which make PAIRS / 64
    assert taken(budget, reading(0, 20, tenant="b")) == 20
    assert taken(budget, reading(2000, tenant="b")) == 0
    # A token alone is no long one.
    assert taken(budget, reading(0, 1, tenant="c")) == 1


def test_a_flood_of_deep_prompts_delays_another_tenant_by_no_long_step() -> None:
    limits = SchedulerLimits(8, 512, 0.0, max_pairs=PAIRS)
    scheduler = FCFSScheduler(CountingMemory(10_000), limits, shares=TenantShares())
    memory = scheduler._memory
    for index in range(8):
        scheduler.add(of("flood", f"f{index}", 8000, max_tokens=1))
    for _ in range(100):
        run(scheduler, memory)  # type: ignore[arg-type]
    scheduler.add(of("other", "o", 40, max_tokens=1))
    plan = run(scheduler, memory)  # type: ignore[arg-type]
    assert plan is not None
    computed = {name: num_new for name, _, num_new in shape(plan)}
    assert computed["o"] == 40
    assert sum(computed.values()) <= 40 + 64 + 8


def test_every_prompt_is_read_to_its_end() -> None:
    rng = random.Random(5)
    limits = SchedulerLimits(8, 128, 0.0, max_pairs=2000)
    scheduler = FCFSScheduler(CountingMemory(10_000), limits, shares=TenantShares())
    for index in range(30):
        tenant = rng.choice("abc")
        scheduler.add(of(tenant, f"{index}", rng.randint(1, 900), max_tokens=rng.randint(1, 9)))
    for _ in range(2000):
        if run(scheduler, scheduler._memory) is None:  # type: ignore[arg-type]
            break
    assert scheduler.num_running == scheduler.num_waiting == 0


def test_choices_that_draw_together_start_one_request_a_step() -> None:
    limits = SchedulerLimits(64, 512, 0.0)
    scheduler = FCFSScheduler(CountingMemory(10_000), limits)
    for index in range(3):
        request = of("a", f"n{index}", 4, max_tokens=1)
        request.num_branches = 100
        request.sequences += [Sequence(request, i, list(range(4)), 4) for i in range(1, 100)]
        scheduler.add(request)
    scheduler.add(of("a", "one", 4, max_tokens=1))
    started = []
    while (plan := run(scheduler, scheduler._memory)) is not None:  # type: ignore[arg-type]
        started.append([name for name, _, _ in shape(plan)])
    assert started == [["n0"], ["n1"], ["n2", "one"]]
