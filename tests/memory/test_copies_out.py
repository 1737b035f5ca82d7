"""Blocks on their way to host memory: what nobody may do with them before they are there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.memory.model_types import Kind, Op, Shape
from tests.memory.rig import Fault, Options, Rig

#: Blocks of 2 tokens, 4 of them a page.
SHAPE = Shape(
    block_tokens=2,
    blocks_per_page=4,
    max_seqs=6,
    num_slots=3,
    max_len=32,
    max_pages=8,
    swap_blocks=64,
    copies_late=True,
)


def make(limit_pages: int = 8, **options: Any) -> Rig:
    return Rig(Options(shape=SHAPE, limit_pages=limit_pages, **options))


def start(rig: Rig, num_tokens: int, *, paged: bool = True, private: bool = True) -> int:
    seq = rig.open(paged=paged, known=num_tokens, private=private)
    assert seq is not None
    assert rig.step([Op(Kind.GROW, seq, num_tokens)])
    rig.complete(rig.model.begun)
    return seq


def do(rig: Rig, *ops: Op) -> None:
    assert rig.step(ops)
    rig.complete(rig.model.begun)
    rig.check()


def out(rig: Rig, seq: int) -> None:
    do(rig, Op(Kind.SWAP_OUT, seq))
    assert rig.core.is_copying()


def comes_back(rig: Rig, seq: int) -> None:
    """With what it had: every byte is looked at."""
    do(rig, Op(Kind.SWAP_IN, seq))
    rig.give_everything_back()


def blocks(rig: Rig, seq: int) -> list[int]:
    return list(rig.model.seen.seqs[seq].blocks)


@pytest.mark.parametrize("paged", [True, False])
def test_pages_are_free_when_their_copies_have_ended(paged: bool) -> None:
    rig = make(4)
    seq, other = start(rig, 16, paged=paged), rig.open(private=True)
    assert other is not None
    out(rig, seq)
    assert rig.core.stats().waiting_pages == 2
    assert rig.core.stats().copying_blocks == 8
    assert not rig.step([Op(Kind.GROW, other, 24)])
    rig.run_copies(100)
    assert not rig.core.is_copying()
    do(rig, Op(Kind.GROW, other, 24))
    rig.release(other)
    rig.complete(rig.model.begun)
    comes_back(rig, seq)


def test_a_plan_can_wait_for_them() -> None:
    rig = make(4)
    seq, other = start(rig, 32), rig.open(private=True)
    assert other is not None
    out(rig, seq)
    plan = rig.plan([Op(Kind.GROW, other, 8)])
    assert (plan.fits, plan.waiting_pages) == (False, 4)
    assert rig.core.finish_copies()
    assert not rig.core.finish_copies()  # there are none
    rig.see_copies()
    do(rig, Op(Kind.GROW, other, 8))
    rig.release(other)
    rig.complete(rig.model.begun)
    comes_back(rig, seq)


def test_who_shares_a_tail_copies_it_before_writing() -> None:
    """Also where the reference that was to be given up is gone."""
    rig = make()
    seq, child = start(rig, 3), rig.open(paged=True, private=True)
    assert child is not None
    do(rig, Op(Kind.FORK, child, 3, other=seq))
    assert blocks(rig, child) == blocks(rig, seq)
    shared = blocks(rig, seq)
    out(rig, seq)
    do(rig, Op(Kind.GROW, child, 4))
    assert blocks(rig, child)[0] == shared[0]
    assert blocks(rig, child)[1] != shared[1]
    comes_back(rig, seq)


def test_who_shares_a_tail_of_copies_that_have_ended_writes_there() -> None:
    rig = make()
    seq, child = start(rig, 3), rig.open(paged=True, private=True)
    assert child is not None
    do(rig, Op(Kind.FORK, child, 3, other=seq))
    shared = blocks(rig, seq)
    out(rig, seq)
    rig.finish_copies()
    do(rig, Op(Kind.GROW, child, 4))
    assert blocks(rig, child) == shared
    comes_back(rig, seq)


def test_a_plan_knows_of_the_copy_on_the_write() -> None:
    rig = make(1)
    seq, child = start(rig, 3), rig.open(paged=True, private=True)
    assert child is not None
    do(rig, Op(Kind.FORK, child, 3, other=seq))
    other = start(rig, 4)
    out(rig, seq)
    plan = rig.plan([Op(Kind.GROW, child, 4)])
    assert (plan.fits, plan.needed_pages, plan.waiting_pages) == (False, 1, 1)
    rig.finish_copies()
    do(rig, Op(Kind.GROW, child, 4))
    for each in (child, other):
        rig.release(each)
    rig.complete(rig.model.begun)
    comes_back(rig, seq)


def test_a_fork_in_the_middle_of_a_block_copies_it_though_its_parent_has_gone() -> None:
    rig = make()
    seq, parent, child = start(rig, 4), *(rig.open(paged=True, private=True) for _ in "ab")
    assert parent is not None
    assert child is not None
    do(rig, Op(Kind.FORK, parent, 4, other=seq))
    out(rig, seq)
    do(rig, Op(Kind.FORK, child, 3, other=parent))
    rig.release(parent)
    shared = blocks(rig, child)
    do(rig, Op(Kind.GROW, child, 4))
    assert blocks(rig, child)[1] != shared[1]
    comes_back(rig, seq)


def test_a_page_is_not_claimed_from_under_a_copy() -> None:
    """A cached prefix of it is, but the tail behind that is still being read."""
    rig = make()
    seq = start(rig, 3, private=False)
    page = blocks(rig, seq)[0] // SHAPE.blocks_per_page
    out(rig, seq)
    other = rig.open(known=3)
    assert other is not None
    assert rig.match(other) == 2
    do(rig, Op(Kind.ATTACH, other, 2), Op(Kind.GROW, other, 8))
    assert blocks(rig, other)[0] // SHAPE.blocks_per_page != page
    rig.finish_copies()
    third = rig.open(known=3)
    assert third is not None
    do(rig, Op(Kind.ATTACH, third, 2), Op(Kind.GROW, third, 8))
    comes_back(rig, seq)


def test_the_other_blocks_of_a_page_are_not_handed_out() -> None:
    rig = make(2)
    one, two = start(rig, 4), start(rig, 4)
    assert {b // 4 for b in (*blocks(rig, one), *blocks(rig, two))} == {0}
    out(rig, one)
    third, fourth = (rig.open(paged=True, private=True) for _ in "ab")
    assert third is not None
    assert fourth is not None
    do(rig, Op(Kind.GROW, third, 8))
    assert {b // 4 for b in blocks(rig, third)} == {1}
    plan = rig.plan([Op(Kind.GROW, fourth, 4)])
    assert (plan.fits, plan.waiting_pages) == (False, 1)
    rig.run_copies(100)
    do(rig, Op(Kind.GROW, fourth, 4))
    assert {b // 4 for b in blocks(rig, fourth)} == {0}
    rig.release(third)
    rig.complete(rig.model.begun)
    comes_back(rig, one)


def test_packing_leaves_copied_blocks_alone() -> None:
    rig = make()
    seqs = [start(rig, 4) for _ in range(4)]  # two on each of two pages
    out(rig, seqs[0])
    rig.release(seqs[2])
    rig.complete(rig.model.begun)
    before = blocks(rig, seqs[1]), blocks(rig, seqs[3])
    rig.compact()
    assert (blocks(rig, seqs[1]), blocks(rig, seqs[3])) == before
    rig.run_copies(100)
    rig.compact()
    assert len({b // 4 for s in (seqs[1], seqs[3]) for b in blocks(rig, s)}) == 1
    rig.check()
    comes_back(rig, seqs[0])


def test_a_block_can_be_copied_twice_at_once() -> None:
    rig = make()
    seq, child = start(rig, 4), rig.open(paged=True, private=True)
    assert child is not None
    do(rig, Op(Kind.FORK, child, 4, other=seq))
    out(rig, seq)
    out(rig, child)
    assert rig.core.stats().copying_blocks == 4
    rig.run_copies(2)  # a run for each group: all of the first
    assert rig.core.stats().copying_blocks == 2
    rig.run_copies(1)
    assert rig.core.stats().copying_blocks == 2  # half of the second
    do(rig, Op(Kind.SWAP_IN, seq))
    assert rig.core.stats().copying_blocks == 0  # in their order
    comes_back(rig, child)


@pytest.mark.parametrize("chore", ["trim", "set_limit"])
def test_memory_is_given_back_behind_them(chore: str) -> None:
    rig = make()
    seq = start(rig, 32)
    out(rig, seq)
    committed = rig.core.stats().committed_pages
    assert committed >= 4
    if chore == "trim":
        assert rig.trim(0, drop_idle=True) == committed
    else:
        rig.set_limit(1)
        assert rig.core.stats().committed_pages == 1
        rig.set_limit(8)
    rig.check()
    comes_back(rig, seq)


def test_released_in_host_memory_before_it_is_there() -> None:
    """Host memory that it leaves is the next one's: in their order."""
    rig = make()
    seq, other = start(rig, 8), start(rig, 8)
    out(rig, seq)
    rig.release(seq)
    out(rig, other)
    assert rig.core.stats().swap_blocks == 4
    comes_back(rig, other)


def test_every_call_of_swapping_fails_in_turn() -> None:
    """Everything is as before, and a second try goes through: also where the system had no memory
    to swap to."""
    refused = 0
    for forever in (False, True):
        for call in range(1, 12):
            rig = make()
            seq, child = start(rig, 5), rig.open(paged=True, private=True)
            assert child is not None
            do(rig, Op(Kind.FORK, child, 5, other=seq))
            ops = [Op(Kind.SWAP_OUT, seq), Op(Kind.GROW, child, 14)]
            done = rig.step(ops, Fault(call, forever=forever))
            refused += not done
            rig.check()
            if not done:
                assert not rig.core.is_copying()
                do(rig, *ops)
            rig.complete(rig.model.begun)
            for again in range(1, 8):
                if rig.step([Op(Kind.SWAP_IN, seq)], Fault(again, forever=forever)):
                    break
                refused += 1
                rig.check()
            rig.check()
            rig.give_everything_back()
    assert refused > 20


def test_waiting_that_is_refused_is_told_and_tried_again() -> None:
    rig = make()
    seq = start(rig, 8)
    out(rig, seq)
    rig.faults.arm(1, forever=True)
    assert not rig.core.finish_copies()
    assert rig.core.is_copying()
    assert "fence" in rig.core.last_error()
    rig.faults.disarm()
    rig.check()
    comes_back(rig, seq)


def test_a_lost_device_fails_the_pool() -> None:
    rig = make()
    seq = start(rig, 8)
    out(rig, seq)
    rig.faults.arm(1, sticky=True)
    assert not rig.core.finish_copies()
    rig.faults.disarm()
    assert rig.core.stats().health.name == "FAILED"
    with pytest.raises(OSError, match="has failed"):
        rig.core.trim(0, False)
