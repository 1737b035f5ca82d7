"""Steps of about the same length: tokens far behind others in a prompt count for more."""

from __future__ import annotations

import pytest

from tests.support.scheduling import Steps, make_request
from vmserve.scheduler.budget import StepBudget
from vmserve.scheduler.fairness import TenantShares

PAIRS = 64 * 3000


def taken(budget: StepBudget, num_past: int, num_prompt: int = 10_000, tenant: str = "a") -> int:
    """What a sequence that is so far in its prompt gets."""
    [sequence] = make_request(f"{tenant}{num_past}", num_prompt, tenant=tenant).sequences
    sequence.num_computed = num_past
    return budget.take(sequence)[1] if budget.can_take(sequence) else 0


@pytest.mark.parametrize("num_past", [0, 100, 1000, 4000, 9000])
def test_a_chunk_has_so_many_pairs(num_past: int) -> None:
    """And an eighth of the step's tokens, or prompts would never end."""
    num_new = taken(StepBudget(512, 1 << 20, pairs=PAIRS), num_past)
    assert num_new >= 64
    if num_new > 64:
        assert num_new == 512 or num_new * (num_past + num_new / 2) <= PAIRS
        assert (num_new + 1) * (num_past + (num_new + 1) / 2) > PAIRS or num_new == 512


def test_without_a_limit_a_chunk_is_what_there_is() -> None:
    assert taken(StepBudget(512, 1 << 20), 9000) == 512


def test_what_a_tenant_has_taken_its_others_wait_for() -> None:
    """One prompt after the other, so that the next may find cached what they have in common."""
    budget = StepBudget(512, 1 << 20, pairs=PAIRS)
    assert [taken(budget, num_past) for num_past in (4000, 5, 3000)] == [64, 0, 0]
    # Another tenant's prompt begins nevertheless, but where it is far on it waits too.
    assert taken(budget, 0, tenant="b") == 77  # which make PAIRS / 64
    assert taken(budget, 0, 20, tenant="b") == 20
    assert taken(budget, 2000, tenant="b") == 0
    # A token alone is no long one.
    assert taken(budget, 0, 1, tenant="c") == 1


def test_a_flood_of_deep_prompts_delays_another_tenant_by_no_long_step() -> None:
    steps = Steps(10_000, budget=512, max_pairs=PAIRS, shares=TenantShares())
    steps.add(*(make_request(f"f{i}", 8000, max_tokens=1, tenant="flood") for i in range(8)))
    steps.steps(100)
    steps.add(make_request("o", 40, max_tokens=1, tenant="other"))
    assert "o 0+40" in steps.step()
    assert steps.last.num_tokens <= 40 + 64 + 8


def test_choices_that_draw_together_start_one_request_a_step() -> None:
    steps = Steps(10_000, seqs=64, budget=512)
    steps.ask(n0=4, n1=4, n2=4, max_tokens=1, n=100)
    steps.ask(one=4, max_tokens=1)
    assert steps.to_the_end() == ["n0 0+4", "n1 0+4", "n2 0+4, one 0+4"]
