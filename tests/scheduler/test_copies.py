"""Those who need nothing of a victim's pages go on beside its copies, for one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from tests.scheduler.fake_memory import CountingMemory
from tests.scheduler.test_fcfs import make_request, run, shape
from vmserve.memory.base import Growth, MemoryOp, MemoryPlan, Shortfall
from vmserve.scheduler.fcfs import FCFSScheduler, SchedulerLimits
from vmserve.scheduler.preemption import PreemptionPolicy
from vmserve.scheduler.sequence import SequenceStatus


class LateMemory(CountingMemory):
    """Pages of who was swapped out are taken until the copies are waited for, or ``end()``."""

    def __init__(self, limit_pages: int, **options: Any) -> None:
        super().__init__(limit_pages, swap_pages=64, **options)
        self.copying: list[int] = []
        self.num_waits = 0
        self.may_wait = True

    def available_pages(self) -> int:
        if self.may_wait:
            self.finish_copies()
        return super().available_pages() - len(self.copying)

    def swap_out(self, seqs: Sequence[int]) -> bool:
        pages = [page for seq in seqs for page in self.page_lists[seq]]
        done = super().swap_out(seqs)
        self.copying += pages if done else []
        return done

    def plan(
        self, growths: Sequence[Growth] | NDArray[Any], ops: Sequence[MemoryOp] = ()
    ) -> MemoryPlan | Shortfall:
        with self.without_waiting():
            answer = super().plan(growths, ops)
        if isinstance(answer, Shortfall) and self.may_wait and self.finish_copies():
            return super().plan(growths, ops)
        return answer

    def apply(self, plan: MemoryPlan) -> int:
        with self.without_waiting():
            return super().apply(plan)

    @property
    def is_copying(self) -> bool:
        return bool(self.copying)

    def finish_copies(self) -> bool:
        self.num_waits += bool(self.copying)
        return self.end()

    def end(self) -> bool:
        were_copying, self.copying = bool(self.copying), []
        return were_copying

    @contextmanager
    def without_waiting(self) -> Iterator[None]:
        before, self.may_wait = self.may_wait, False
        yield
        self.may_wait = before


def scheduler_of(memory: CountingMemory, policy: PreemptionPolicy) -> FCFSScheduler:
    return FCFSScheduler(memory, SchedulerLimits(8, 64, 0.0), preemption=policy)


def full_memory() -> tuple[LateMemory, FCFSScheduler, PreemptionPolicy]:
    """``a`` needs the fifth page; ``b`` has room for two tokens more; ``victim`` came last."""
    memory, policy = LateMemory(4), PreemptionPolicy("swap")
    scheduler = scheduler_of(memory, policy)
    for name, num_prompt in (("a", 3), ("b", 1), ("victim", 6)):
        scheduler.add(make_request(name, num_prompt, max_tokens=9))
    assert shape(run(scheduler, memory)) == [("a", 0, 3), ("b", 0, 1), ("victim", 0, 6)]
    assert shape(run(scheduler, memory)) == [("a", 3, 1), ("b", 1, 1), ("victim", 6, 1)]
    return memory, scheduler, policy


def test_who_needs_no_page_goes_on_beside_the_copies() -> None:
    memory, scheduler, policy = full_memory()
    speed = policy.copy_bytes_per_second
    assert shape(run(scheduler, memory)) == [("b", 2, 1)]
    assert (memory.num_waits, memory.is_copying, scheduler.totals.swaps) == (0, True, 1)
    assert policy.copy_bytes_per_second == speed  # not known yet
    assert shape(run(scheduler, memory)) == [("a", 4, 1), ("b", 3, 1)]
    assert (memory.num_waits, memory.is_copying) == (1, False)
    assert policy.copy_bytes_per_second != speed
    while run(scheduler, memory) is not None:
        pass
    assert (memory.page_lists, memory.swapped) == ({}, {})


def test_copies_that_have_ended_hold_nobody_up() -> None:
    memory, scheduler, policy = full_memory()
    speed = policy.copy_bytes_per_second
    run(scheduler, memory)
    memory.end()
    assert shape(run(scheduler, memory)) == [("a", 4, 1), ("b", 3, 1)]
    assert memory.num_waits == 0
    assert policy.copy_bytes_per_second == speed


def test_where_everybody_needs_pages_the_copies_are_waited_for() -> None:
    memory, policy = LateMemory(4), PreemptionPolicy("swap")
    scheduler = scheduler_of(memory, policy)
    for name, num_prompt in (("a", 3), ("b", 3), ("victim", 6)):
        scheduler.add(make_request(name, num_prompt, max_tokens=9))
    run(scheduler, memory)
    run(scheduler, memory)
    assert shape(run(scheduler, memory)) == [("a", 4, 1), ("b", 4, 1)]
    assert memory.num_waits == 1


def test_a_step_ahead_does_without_the_pages() -> None:
    memory, scheduler, _ = full_memory()
    run(scheduler, memory)
    with memory.without_waiting():
        assert scheduler.schedule(ahead=True) is None  # a has no room
    assert memory.num_waits == 0
    assert shape(run(scheduler, memory)) == [("a", 4, 1), ("b", 3, 1)]


def test_a_victim_that_comes_last_of_all_comes_back() -> None:
    """Every request ends, whenever copies end."""
    memory, scheduler, _ = full_memory()
    requests = [make_request(f"late {i}", 5 + i, max_tokens=7) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    steps = 0
    while scheduler.num_running or scheduler.num_waiting:
        assert run(scheduler, memory) is not None
        steps += 1
        if steps % 3 == 0:
            memory.end()
        assert steps < 500
    assert scheduler.totals.swaps > 1
    assert all(r.sequences[0].status is SequenceStatus.FINISHED for r in requests)
    assert (memory.page_lists, memory.swapped) == ({}, {})
