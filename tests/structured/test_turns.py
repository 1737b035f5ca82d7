"""Whose constraint is compiled next."""

from __future__ import annotations

from vmserve.structured.spec import Constraint
from vmserve.structured.turns import TenantTurns


def regex(text: str) -> Constraint:
    return Constraint("regex", text)


def taken(turns: TenantTurns) -> str | None:
    turn = turns.take()
    return None if turn is None else turn[0] + turn[1].text


def test_tenants_take_turns() -> None:
    turns = TenantTurns(most_running=9)
    for tenant, text in ("a1", "a2", "a3", "b1", "c1", "b2"):
        turns.add(tenant, regex(text))
    assert len(turns) == 3  # equal ones are one
    assert [taken(turns) for _ in range(4)] == ["a1", "b2", "a3", None]
    for tenant, text in ("a1", "a2", "a3", "b4", "c5", "b6"):
        turns.add(tenant, regex(text))
    assert [taken(turns) for _ in range(7)] == ["a1", "b4", "c5", "a2", "b6", "a3", None]


def test_nobody_has_more_places_than_they_may() -> None:
    turns = TenantTurns(most_running=2)
    for text in "1234":
        turns.add("a", regex(text))
    assert [taken(turns) for _ in range(3)] == ["a1", "a2", None]
    turns.add("b", regex("4"))  # which is not theirs alone
    assert [taken(turns) for _ in range(2)] == ["b4", None]
    turns.done("a")
    assert [taken(turns) for _ in range(2)] == ["a3", None]
    assert len(turns) == 0


def test_what_is_removed_is_not_taken() -> None:
    turns = TenantTurns(most_running=2)
    for tenant in "ab":
        turns.add(tenant, regex("1"))
        turns.remove(tenant, regex("never added"))
    turns.remove("a", regex("1"))
    assert len(turns) == 1
    turns.remove("c", regex("1"))
    assert [taken(turns), taken(turns)] == ["b1", None]
