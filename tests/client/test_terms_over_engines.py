"""What belongs to a request is kept by each of several engines: who is next, until when, whose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from tests.client.test_remote_llm import KEY, hosted
from tests.clients import FleetClient
from vmserve import SamplingParams
from vmserve.errors import DeadlineError
from vmserve.types import RequestOutput

pytestmark = pytest.mark.timeout(300)

OPTIONS = {"max_num_seqs": 1, "fair_sharing": True, "scheduling_policy": "priority"}

Test = Callable[[FleetClient], Coroutine[Any, Any, None]]


@pytest.fixture
def run() -> Iterator[Callable[[Test], None]]:
    """Calls a test with two engines that run one sequence each."""
    with hosted(**OPTIONS) as (one, _), hosted(**OPTIONS) as (other, _):

        async def with_fleet(test: Test) -> None:
            fleet = FleetClient.connected([one, other], KEY, "round-robin")
            await asyncio.wait_for(test(fleet), 200)
            assert [len(member.requests) for member in fleet.members] == [0, 0]
            await fleet.shutdown()

        yield lambda test: asyncio.run(with_fleet(test))


async def final(fleet: FleetClient, number: int, **terms: Any) -> RequestOutput:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompt = [5 + number] * 20
    [output] = [each async for each in fleet.generate(prompt, params, **terms)]
    return output


@pytest.mark.parametrize("why", ["fairness", "priority"])
def test_who_asks_last_is_next_in_both_engines(why: str, run: Callable[[Test], None]) -> None:
    """Behind five of another tenant's in each, or before them by its priority."""
    order: tuple[list[str], list[str]] = ([], [])
    last = {"tenant": "b"} if why == "fairness" else {"tenant": "a", "priority": -1}

    async def ask(fleet: FleetClient, number: int, name: str, **terms: Any) -> None:
        await final(fleet, number, **terms)
        order[number % 2].append(name)  # in turn: round robin

    async def test(fleet: FleetClient) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(ask(fleet, number, "first", tenant="a"))
                await asyncio.sleep(0)
            while sum(len(member.requests) for member in fleet.members) < 10:
                await asyncio.sleep(0)
            for number in range(2):
                group.create_task(ask(fleet, number, "last", **last))

    run(test)
    for each in order:
        assert len(each) == 6
        assert each.index("last") <= 2, order


def test_deadlines_pass_in_the_queues_of_both(run: Callable[[Test], None]) -> None:
    async def test(fleet: FleetClient) -> None:
        long = [asyncio.create_task(final(fleet, number)) for number in range(2)]
        while sum(len(member.requests) for member in fleet.members) < 2:
            await asyncio.sleep(0)
        late = [asyncio.create_task(final(fleet, number, timeout=0.001)) for number in range(2)]
        for each in late:
            with pytest.raises(DeadlineError):
                await each
        for each in long:
            assert len((await each).outputs[0].token_ids) == 60

    run(test)


def test_prefixes_are_the_keys_own_in_both(run: Callable[[Test], None]) -> None:
    """Also one that is pinned: who has another key or salt finds nothing, wherever it asks."""
    prompt = [9] * 64
    once = SamplingParams(temperature=0, max_tokens=1)

    async def num_found(fleet: FleetClient, **terms: Any) -> set[int]:
        outputs = [
            each
            for _ in range(2)  # in turn
            async for each in fleet.generate([*prompt, 5], once, **terms)
        ]
        return {each.metrics.num_cached_tokens for each in outputs}

    async def test(fleet: FleetClient) -> None:
        pin = await fleet.pin_prefix(prompt, cache_salt="s", isolation="k")
        for terms in ({}, {"cache_salt": "s"}, {"isolation": "k"}):
            assert await num_found(fleet, **terms) == {0}
        assert await num_found(fleet, cache_salt="s", isolation="k") == {64}
        await fleet.unpin_prefix(pin.handle)

    run(test)
