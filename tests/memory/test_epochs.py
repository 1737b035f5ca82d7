"""What a plan survives: it is stale when a caller changed something, not when time passed."""

from __future__ import annotations

import errno

import pytest

from tests.memory.support import Memory, grow, make_memory
from vmserve._core import MapperMode


def ahead() -> tuple[Memory, int]:
    """A sequence whose next page, and the pool's next chunk, the mapper is to see to."""
    memory = make_memory(mapper=MapperMode.MANUAL, lookahead_tokens=4, grow_pages=2)
    seq = memory.open(range(1, 9))
    memory.begin(grow(seq, 8))
    return memory, seq


def test_what_the_mapper_does_and_a_step_that_ends_meanwhile_do_not_spoil_a_plan() -> None:
    memory, seq = ahead()
    plan = memory.fits(grow(seq, 16))
    assert memory.core.run_mapper(8) > 0
    assert memory.core.apply([grow(seq, 16)], plan.version) == 2
    plan = memory.fits(grow(seq, 20))
    memory.core.complete(2)
    memory.core.stats()
    memory.core.apply([grow(seq, 20)], plan.version)
    memory.core.check()


@pytest.mark.parametrize("forever", [False, True])
def test_a_refusal_behind_a_plan_is_found_out_when_it_is_carried_out(forever: bool) -> None:
    memory, seq = ahead()
    plan = memory.fits(grow(seq, 12))
    memory.faults.arm(1, forever=forever, code=errno.EINVAL)
    memory.core.run_mapper(8)
    memory.faults.disarm()
    memory.core.apply([grow(seq, 12)], plan.version)
    memory.core.check()


def test_what_another_caller_changes_makes_a_plan_stale() -> None:
    memory, seq = ahead()
    other = memory.open()
    for change in (
        lambda: memory.do(grow(other, 1)),
        lambda: memory.release(other),
        lambda: memory.core.set_limit(15),
        memory.core.clear_cache,
    ):
        plan = memory.fits(grow(seq, 12))
        change()
        before = memory.state()
        with pytest.raises(ValueError, match="the plan is stale"):
            memory.core.apply([grow(seq, 12)], plan.version)
        assert memory.state() == before
