"""Those who need nothing of a victim's pages go on beside its copies, for one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from tests.scheduler.fake_memory import CountingMemory
from tests.support.scheduling import Steps, said
from vmserve.memory.base import Growth, MemoryOp, MemoryPlan, Shortfall
from vmserve.scheduler.preemption import PreemptionPolicy


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


class LateSteps(Steps):
    """Three requests, and a step after the one that reads their prompts."""

    memory: LateMemory

    def __init__(self, **prompts: int) -> None:
        self.policy = PreemptionPolicy("swap")
        super().__init__(4, memory=LateMemory, preemption=self.policy)
        self.ask(**prompts, max_tokens=9)
        self.steps(2)
        self.speed = self.policy.copy_bytes_per_second


def full_memory() -> LateSteps:
    """``a`` needs the fifth page; ``b`` has room for two tokens more; ``victim`` came last."""
    steps = LateSteps(a=3, b=1, victim=6)
    assert said(steps.last) == "a 3+1, b 1+1, victim 6+1"
    return steps


def test_who_needs_no_page_goes_on_beside_the_copies() -> None:
    steps = full_memory()
    memory = steps.memory
    assert steps.step() == "b 2+1"
    assert (memory.num_waits, memory.is_copying, steps.scheduler.totals.swaps) == (0, True, 1)
    assert steps.policy.copy_bytes_per_second == steps.speed  # not known yet
    assert steps.step() == "a 4+1, b 3+1"
    assert (memory.num_waits, memory.is_copying) == (1, False)
    assert steps.policy.copy_bytes_per_second != steps.speed
    steps.to_the_end()
    assert (memory.page_lists, memory.swapped) == ({}, {})


def test_copies_that_have_ended_hold_nobody_up() -> None:
    steps = full_memory()
    steps.step()
    steps.memory.end()
    assert steps.step() == "a 4+1, b 3+1"
    assert steps.memory.num_waits == 0
    assert steps.policy.copy_bytes_per_second == steps.speed


def test_where_everybody_needs_pages_the_copies_are_waited_for() -> None:
    steps = LateSteps(a=3, b=3, victim=6)
    assert steps.step() == "a 4+1, b 4+1"
    assert steps.memory.num_waits == 1


def test_a_step_ahead_does_without_the_pages() -> None:
    steps = full_memory()
    steps.step()
    with steps.memory.without_waiting():
        assert steps.scheduler.schedule(ahead=True) is None  # a has no room
    assert steps.memory.num_waits == 0
    assert steps.step() == "a 4+1, b 3+1"
