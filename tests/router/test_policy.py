"""Laws of the router: who may be chosen, when a prefix decides, and what is remembered."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.interrupting import count_instructions
from vmserve.router.chains import ChainTable, chain_of
from vmserve.router.policy import Policy, Router, Routing

BLOCK = 4
POLICIES: tuple[Policy, ...] = ("prefix", "least-loaded", "round-robin")


def router(num_members: int = 4, policy: Policy = "prefix", *, blocks: int = 1000) -> Router:
    made = Router(policy, block_tokens=BLOCK)
    for index in range(num_members):
        made.join(str(index), blocks)
    return made


def idle(num_members: int = 4) -> dict[str, float]:
    return {str(index): 0.0 for index in range(num_members)}


def choose(made: Router, ids: list[int], root: object, loads: Mapping[str, float]) -> Routing:
    """Choose among members that have these loads, and no others."""
    for name in made.members:
        made.note(name, loads.get(name))
    return made.choose(ids, root)


def prompt(seed: int, length: int = 40) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


#: Prompts that share prefixes of whole and part blocks, of two roots.
prompts = st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 3)).map(
    lambda drawn: prompt(drawn[0], 20)[: drawn[1]] + prompt(10 + drawn[2], 7)
)
roots = st.sampled_from([("", ""), ("tenant", ""), ("tenant", "salt"), ("salt", "tenant")])


@st.composite
def walks(draw: st.DrawFn) -> list[tuple[str, object]]:
    """Joins, leaves, restarts and requests to some of the members in any order."""
    names = st.sampled_from("abcde")
    request = st.tuples(
        st.just("request"),
        st.tuples(prompts, roots, st.dictionaries(names, st.integers(0, 9), max_size=5)),
    )
    change = st.tuples(st.sampled_from(["join", "leave", "forget"]), names)
    return draw(st.lists(st.one_of(request, request, change), max_size=40))


def walk(events: list[tuple[str, object]], policy: Policy) -> list[str]:
    """Who is chosen, with the laws that hold at any time."""
    made = Router(policy, block_tokens=BLOCK, table=ChainTable(24))
    model: dict[str, list[tuple[object, list[int]]]] = {}
    chosen = []
    for kind, what in events:
        if kind == "request":
            ids, root, wanted = what  # type: ignore[misc]
            loads = {name: load for name, load in wanted.items() if name in model}
            if not loads:
                continue
            choice = choose(made, ids, root, loads)
            assert choice.member in loads
            cached = (root, ids[: choice.cached_tokens])
            assert not choice.cached_tokens or any(
                (of, sent[: choice.cached_tokens]) == cached for of, sent in model[choice.member]
            ), "what is said to be cached was sent, to this member, since it began, for this root"
            model[choice.member].append((root, ids))
            chosen.append(choice.member)
        elif kind == "join":
            made.join(str(what), 10)
            model[str(what)] = []
        elif what in model:
            if kind == "forget":
                made.forget(str(what))
                model[str(what)] = []
            else:
                made.leave(str(what))
                del model[str(what)]
        assert made.members == model.keys()
        assert made.num_blocks <= min(24, 10 * max(1, len(model)))
    return chosen


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=150, deadline=None)
@given(events=walks())
def test_laws_hold_in_any_order_of_events(policy: Policy, events: list[tuple[str, object]]) -> None:
    assert walk(events, policy) == walk(events, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_members_take_turns(policy: Policy) -> None:
    made = router(policy=policy)
    chosen = Counter(choose(made, prompt(n), "", idle()).member for n in range(40))
    assert set(chosen.values()) == {10}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("held_by", ["nobody", "one", "all"])
def test_a_choice_costs_the_same_among_many_as_among_few(policy: Policy, held_by: str) -> None:
    def cost(num_members: int) -> int:
        made = router(num_members, policy)
        for name in idle(num_members):
            made.note(name, 0)
        for _ in range({"nobody": 0, "one": 1, "all": 4 * num_members}[held_by]):
            member = made.choose(prompt(1), "").member
            made.note(member, 1)  # so that another one is next
            made.note(member, 0)
        made.choose(prompt(2), "")
        return count_instructions(lambda: made.choose(prompt(1), ""))

    assert cost(256) <= cost(4) + 5


def test_a_request_follows_its_prefix() -> None:
    made = router()
    first = choose(made, prompt(1), "", idle())
    assert (first.reason, first.cached_tokens) == ("least", 0)
    for n in range(3):
        again = choose(made, prompt(1) + prompt(n), "", idle())
        assert (again.member, again.reason) == (first.member, "prefix")
        assert again.cached_tokens == 40


def test_the_longest_match_wins() -> None:
    made = router()
    short = choose(made, prompt(1)[:20], "", idle()).member
    longer = choose(made, prompt(1), "", {**idle(), short: 9}).member
    assert longer != short
    assert choose(made, prompt(1), "", idle()).member == longer


def test_a_hot_prefix_spills() -> None:
    made = router()
    loads = idle()
    reasons = []
    for _ in range(400):
        choice = choose(made, prompt(1), "", loads)
        loads[choice.member] += 1
        reasons.append(choice.reason)
    assert "spill" in reasons
    assert max(loads.values()) < 1.1 * min(loads.values())


def test_a_prefix_is_worth_less_than_its_load_above_the_mean() -> None:
    made = router()
    loads = dict.fromkeys("0123", 10.0)
    owner = choose(made, prompt(1), "", loads).member
    # 40 of 50 tokens: until the owner's load is 0.8 means above the least one.
    for extra, follows in ((7.0, True), (13.0, False)):
        asked = choose(made, prompt(1) + prompt(int(extra), 10), "", {**loads, owner: 10 + extra})
        assert (asked.member == owner) is follows, extra


def test_a_prefix_that_is_not_hot_has_one_home() -> None:
    """After a spill both members have it, and the older copy is no longer asked for."""
    made = router(2)
    old = choose(made, prompt(1), "", idle(2)).member
    moved = choose(made, prompt(1), "", {**idle(2), old: 9})
    assert (moved.member != old, moved.reason) == (True, "spill")
    for n in range(3):
        for other in range(3):
            choose(made, prompt(10 * n + other + 2), "", idle(2))
        again = choose(made, prompt(1), "", {old: 2, moved.member: 4})
        assert (again.member, again.reason) == (moved.member, "prefix")
    assert choose(made, prompt(1), "", {old: 2, moved.member: 4}).member == old, "hot: copies equal"


def test_a_prefix_that_is_not_hot_leaves_an_overloaded_home() -> None:
    made = router(4)
    loads = dict.fromkeys("0123", 10.0)
    owner = choose(made, prompt(1), "", loads).member
    # 40 of 50 tokens at a weight of 0.6: until the owner has 1.33 means more than the least one.
    for extra, follows in ((17.0, True), (24.0, False)):
        for other in range(5):
            choose(made, prompt(10 * int(extra) + other), "", loads)
        asked = choose(made, prompt(1) + prompt(int(extra), 10), "", {**loads, owner: 10 + extra})
        assert (asked.member == owner) is follows, extra


def test_least_recently_sent_blocks_are_forgotten_from_their_ends() -> None:
    made = router(1, blocks=15)
    alone = idle(1)
    choose(made, prompt(1), "", alone)
    choose(made, prompt(2), "", alone)  # 10 more blocks; the last 5 of the first go
    assert choose(made, prompt(1)[:20], "", alone).cached_tokens == 20
    assert choose(made, prompt(1), "", alone).cached_tokens == 20


def test_one_that_takes_no_requests_is_passed_over() -> None:
    made = router()
    owner = choose(made, prompt(1), "", idle()).member
    others = {name: 3.0 for name in idle() if name != owner}
    choice = choose(made, prompt(1), "", others)
    assert (choice.member in others, choice.reason) == (True, "least")
    assert choose(made, prompt(2), "", {owner: 9.0}).reason == "only"


def test_a_member_without_prefix_cache_is_expected_to_have_nothing() -> None:
    made = router(2, blocks=0)
    for _ in range(4):
        assert choose(made, prompt(1), "", idle(2)).reason == "least"
    assert made.num_blocks == 0


@settings(max_examples=100, deadline=None)
@given(ids=prompts, other=prompts)
def test_chains_agree_as_far_as_whole_blocks_do(ids: list[int], other: list[int]) -> None:
    def equal(a: list[int], b: list[int]) -> int:
        return next(
            (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )

    first, second = (chain_of(each, "", BLOCK) for each in (ids, other))
    assert equal(first, second) == equal(ids, other) // BLOCK
    table = ChainTable(1000)
    table.join("a", 100)
    table.add("a", first, 1)
    length = equal(first, second)
    assert table.matches(second) == ([(table.bit_of("a"), length)] if length else [])
