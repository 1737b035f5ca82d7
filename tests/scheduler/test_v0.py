"""The paper's policy: a step reads prompts or decodes, never both."""

from __future__ import annotations

from tests.scheduler.fake_memory import CountingMemory
from tests.scheduler.test_fcfs import make_request, run, shape
from vmserve.scheduler.fcfs import FCFSScheduler, SchedulerLimits
from vmserve.scheduler.preemption import PreemptionPolicy


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(
    memory: CountingMemory, *, delay: float = 0.0, clock: Clock | None = None
) -> FCFSScheduler:
    limits = SchedulerLimits(8, 16, 0.0, separates_phases=True, delay_factor=delay)
    return FCFSScheduler(
        memory, limits, preemption=PreemptionPolicy("swap"), clock=clock or Clock()
    )


def test_prompts_come_first_and_alone() -> None:
    memory = CountingMemory(64)
    scheduler = make(memory)
    scheduler.add(make_request("a", 6))
    assert shape(run(scheduler, memory)) == [("a", 0, 6)]
    scheduler.add(make_request("b", 6))
    scheduler.add(make_request("c", 6))
    # "a" waits while both are read in one step, though it could decode.
    assert shape(run(scheduler, memory)) == [("b", 0, 6), ("c", 0, 6)]
    assert shape(run(scheduler, memory)) == [("a", 6, 1), ("b", 6, 1), ("c", 6, 1)]


def test_a_prompt_above_the_budget_is_read_in_steps_of_its_own() -> None:
    memory = CountingMemory(64)
    scheduler = make(memory)
    scheduler.add(make_request("a", 6))
    run(scheduler, memory)
    scheduler.add(make_request("long", 40))
    chunks = [shape(run(scheduler, memory)) for _ in range(3)]
    assert chunks == [[("long", 0, 16)], [("long", 16, 16)], [("long", 32, 8)]]
    assert shape(run(scheduler, memory)) == [("a", 6, 1), ("long", 40, 1)]


def test_who_was_swapped_out_comes_back_before_prompts_are_read() -> None:
    memory = CountingMemory(6, swap_pages=8)
    scheduler = make(memory)
    for name in "ab":
        scheduler.add(make_request(name, 8, max_tokens=8))
    scheduler.add(make_request("late", 8, max_tokens=1))
    steps = []
    while (plan := run(scheduler, memory)) is not None:
        steps.append(shape(plan))
        phases = {num_new > 1 for _, _, num_new in steps[-1]}
        assert len(phases) == 1, steps[-1]
    assert scheduler.num_swaps_total > 0
    first_late = next(i for i, step in enumerate(steps) if step[0][0] == "late")
    assert all(name != "b" for step in steps[first_late:] for name, _, _ in step)


def test_prompts_wait_for_each_other() -> None:
    memory, clock = CountingMemory(64), Clock()
    scheduler = make(memory, delay=2.0, clock=clock)
    scheduler.add(make_request("a", 6, max_tokens=20))
    assert shape(run(scheduler, memory)) == [("a", 0, 6)]
    clock.now = 1.0
    run(scheduler, memory)  # a second has passed since: so long do prompts take
    for name, arrival in (("b", 1.0), ("c", 2.5)):
        request = make_request(name, 6)
        request.metrics.arrival_time = arrival
        scheduler.add(request)
        clock.now = arrival + 0.4
        assert shape(run(scheduler, memory))[0][0] == "a"
    clock.now = 3.1
    assert shape(run(scheduler, memory)) == [("b", 0, 6), ("c", 0, 6)]


def test_nobody_waits_where_nothing_runs() -> None:
    memory, clock = CountingMemory(64), Clock()
    scheduler = make(memory, delay=50.0, clock=clock)
    scheduler._prompts_took = 10.0
    scheduler.add(make_request("a", 6))
    assert shape(run(scheduler, memory)) == [("a", 0, 6)]


def test_the_last_token_of_a_prompt_that_the_budget_cut_off_is_read_before_later_prompts() -> None:
    memory = CountingMemory(64)
    scheduler = make(memory)
    scheduler.add(make_request("first", 17))
    assert shape(run(scheduler, memory)) == [("first", 0, 16)]
    scheduler.add(make_request("second", 6))
    assert shape(run(scheduler, memory)) == [("first", 16, 1), ("second", 0, 6)]


def test_a_step_of_prompts_is_planned_again_when_a_stored_prefix_took_pages() -> None:
    memory = CountingMemory(64)
    scheduler = make(memory)
    scheduler.add(make_request("a", 20))
    run(scheduler, memory)
    scheduler.add(make_request("b", 5))
    memory.restores = lambda seq, beside: True
    assert shape(run(scheduler, memory)) == [("a", 16, 4)]
    assert scheduler.num_waiting == 1
