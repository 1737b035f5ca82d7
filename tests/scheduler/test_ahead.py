"""Steps that are planned while the last one runs: nobody gives way, and all is as it was."""

from __future__ import annotations

from tests.scheduler.fake_memory import CountingMemory
from tests.scheduler.test_fcfs import make_request, make_scheduler, shape
from vmserve.scheduler.base import StepPlan
from vmserve.scheduler.fcfs import FCFSScheduler
from vmserve.scheduler.sequence import Request, SequenceStatus

UNKNOWN = -1


def launch(scheduler: FCFSScheduler, memory: CountingMemory, *, ahead: bool = False) -> StepPlan:
    plan = scheduler.schedule(ahead=ahead)
    assert plan is not None
    memory.apply(plan.memory)
    scheduler.applied(plan)
    scheduler.computed(plan)
    return plan


def started(num_prompt: int, pages: int) -> tuple[FCFSScheduler, CountingMemory, list[Request]]:
    """Two requests that have each a token that nobody knows, in pages of 4 tokens."""
    memory = CountingMemory(pages)
    scheduler = make_scheduler(memory)
    requests = [make_request(name, num_prompt, max_tokens=9) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    launch(scheduler, memory)
    for request in requests:
        request.sequences[0].tokens.append(UNKNOWN)
    return scheduler, memory, requests


def test_those_that_run_go_on_and_newcomers_begin_beside_them() -> None:
    scheduler, memory, _ = started(5, 16)
    scheduler.add(make_request("c", 30))
    plan = launch(scheduler, memory, ahead=True)
    assert shape(plan) == [("a", 5, 1), ("b", 5, 1), ("c", 0, 14)]


def test_who_ends_with_the_running_step_has_no_share() -> None:
    scheduler, memory, requests = started(5, 16)
    requests[0].sequences[0].tokens.pop()
    assert shape(launch(scheduler, memory, ahead=True)) == [("b", 5, 1)]


def test_a_shortfall_is_an_answer() -> None:
    """All 4 pages are full: the next token of either would cost the other one its memory."""
    scheduler, memory, requests = started(7, 4)
    assert shape(launch(scheduler, memory, ahead=True)) == [("a", 7, 1), ("b", 7, 1)]
    for request in requests:
        request.sequences[0].tokens[-1:] = [7, UNKNOWN]
    assert scheduler.schedule(ahead=True) is None
    statuses = [request.sequences[0].status for request in requests]
    assert statuses == [SequenceStatus.RUNNING] * 2
    assert scheduler.totals.preemptions == 0
    for request in requests:  # the running step is taken in
        request.sequences[0].tokens[-1] = 7
    assert shape(scheduler.schedule()) == [("a", 8, 1)]
    assert scheduler.totals.preemptions == 1


def test_nothing_to_run_beside_it() -> None:
    memory = CountingMemory(8)
    scheduler = make_scheduler(memory)
    assert scheduler.schedule(ahead=True) is None
    scheduler.add(make_request("a", 5, max_tokens=1))
    launch(scheduler, memory)
    assert scheduler.schedule(ahead=True) is None
