"""Traces that a memory core gets wrong easily, each one by name; the model judges every step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.memory.model_types import Kind, Op, Shape
from tests.memory.rig import Options, Rig
from vmserve._core import ZeroPolicy


def rig(
    blocks_per_page: int = 1,
    *,
    limit_pages: int = 12,
    zero_policy: ZeroPolicy = ZeroPolicy.TENANT,
    **shape: Any,
) -> Rig:
    """Blocks of 4 tokens."""
    return Rig(
        Options(
            Shape(
                block_tokens=4,
                blocks_per_page=blocks_per_page,
                max_seqs=4,
                num_slots=3,
                max_len=32,
                max_pages=12,
                swap_blocks=16,
                **shape,
            ),
            limit_pages=limit_pages,
            zero_policy=zero_policy,
        )
    )


def opened(rig: Rig, tenant: int = 0, *, paged: bool = True, ones: int = 32, **rest: Any) -> int:
    stream = [1] * ones + [2] * (32 - ones)
    seq = rig.open(tenant, paged=paged, stream=stream, known=32, **rest)
    assert seq is not None
    return seq


def grown(rig: Rig, num_tokens: int, **rest: Any) -> int:
    seq = opened(rig, **rest)
    grow(rig, seq, num_tokens)
    return seq


def grow(rig: Rig, seq: int, num_tokens: int, first_token: int = 0) -> None:
    assert rig.step([Op(Kind.GROW, seq, num_tokens, first_token)])
    rig.check()


def complete(rig: Rig) -> None:
    rig.complete(rig.model.begun)
    rig.check()


def release(rig: Rig, seq: int) -> None:
    rig.release(seq)
    rig.check()


def attach(rig: Rig, seq: int, num_tokens: int) -> None:
    assert rig.match(seq) >= num_tokens
    assert rig.step([Op(Kind.ATTACH, seq, num_tokens)])
    rig.check()


def forked(rig: Rig, parent: int, num_tokens: int, *, paged: bool = True, ones: int = 32) -> int:
    tenant = rig.model.seqs[parent].tenant
    child = opened(rig, tenant, paged=paged, ones=ones)
    assert rig.step([Op(Kind.FORK, child, num_tokens, other=parent)])
    rig.check()
    return child


@pytest.mark.parametrize("parent_is_paged", [True, False])
def test_a_published_block_is_not_written_even_by_its_last_holder(parent_is_paged: bool) -> None:
    core = rig()
    parent = grown(core, 8, paged=parent_is_paged)
    complete(core)
    child = forked(core, parent, 6, ones=6)
    release(core, parent)
    grow(core, child, 7)
    complete(core)
    again = opened(core)
    attach(core, again, core.match(again))  # its contents are checked


@pytest.mark.parametrize("paged", [True, False])
def test_what_follows_an_abandoned_epoch_is_not_published(paged: bool) -> None:
    core = rig()
    seq = grown(core, 4, paged=paged)
    core.abandon(core.model.begun)
    core.check()
    grow(core, seq, 12)
    complete(core)
    assert core.model.seqs[seq].sealed == 0
    assert core.match(opened(core)) == 0


def test_a_child_does_not_seal_what_its_parents_abandoned_epoch_wrote() -> None:
    core = rig()
    parent = grown(core, 8)
    child = forked(core, parent, 8)
    core.abandon(1)
    core.check()
    grow(core, child, 12)
    complete(core)
    assert core.model.seqs[child].sealed == 0
    assert core.match(opened(core)) == 0


def test_a_child_forked_before_the_abandoned_part_is_sealed_like_any_other() -> None:
    core = rig()
    parent = grown(core, 4)
    complete(core)
    grow(core, parent, 8)
    core.abandon(core.model.begun)
    child = forked(core, parent, 4)
    grow(core, child, 12)
    complete(core)
    assert core.model.seqs[child].sealed == 12


@pytest.mark.parametrize("reuse", ["grow", "swap_in", "copy_on_write"])
def test_a_block_of_a_split_page_waits_for_the_epoch_that_may_touch_it(reuse: str) -> None:
    """Copies happen at the call; the kernels of a begun epoch may be launched after it."""
    core = rig(blocks_per_page=4)
    kept = grown(core, 6)
    other = grown(core, 3, salt=b"another")
    complete(core)
    if reuse == "swap_in":
        assert core.step([Op(Kind.SWAP_OUT, kept)])
        complete(core)
    keeps_page = grown(core, 1, salt=b"third")
    complete(core)
    child = forked(core, kept, 6) if reuse == "copy_on_write" else kept
    complete(core)
    grow(core, other, 4)  # its kernel has not run
    release(core, other)
    if reuse == "swap_in":
        assert core.step([Op(Kind.SWAP_IN, kept)])
    else:
        assert core.step([Op(Kind.GROW, child, 7 if reuse == "copy_on_write" else 9)])
    core.check()
    release(core, keeps_page)


def test_a_spare_that_another_sequence_used_meanwhile_waits_for_its_epoch() -> None:
    core = rig(limit_pages=3)
    first = grown(core, 9, paged=False)
    complete(core)
    release(core, first)  # its slot is parked with three pages
    reader = opened(core)
    attach(core, reader, 8)
    release(core, reader)  # while the epoch runs
    other = opened(core, paged=False, salt=b"another")
    core.step([Op(Kind.GROW, other, 12)])
    core.check()
    complete(core)
    assert core.step([Op(Kind.GROW, other, 12)])
    core.check()


@pytest.mark.parametrize("zero_policy", [ZeroPolicy.ALWAYS, ZeroPolicy.TENANT])
@pytest.mark.parametrize("how", ["attach", "convert"])
def test_a_page_is_not_cleared_under_an_epoch_that_reads_it(
    how: str, zero_policy: ZeroPolicy
) -> None:
    """Clearing is done at the call, before kernels of a begun epoch are launched."""
    core = rig(blocks_per_page=4, zero_policy=zero_policy)
    seq = grown(core, 4)
    complete(core)
    if how == "attach":
        grow(core, seq, 6)
        release(core, seq)  # its kernel has not run
        attach(core, opened(core, paged=False), 4)
    else:
        other = grown(core, 3, salt=b"another")  # in the same page
        release(core, other)
        assert core.step([Op(Kind.CONVERT, seq, paged=False)])
    core.check()


def test_pages_around_a_shared_one_are_sealed_with_it() -> None:
    """A sequence that comes to the virtual view brings pages that are read-only already."""
    core = rig(blocks_per_page=2)
    short = grown(core, 3, salt=b"another")  # the next one's first blocks are not a page in order
    seq = grown(core, 16)
    complete(core)
    assert core.step([Op(Kind.CONVERT, seq, paged=False)])
    core.check()
    forked(core, seq, 16)
    release(core, short)


def test_a_conversion_behind_a_fork_in_one_plan_has_the_pages_that_it_takes() -> None:
    """The fork shares what the parent would have had for itself."""
    core = rig(blocks_per_page=2, limit_pages=1)
    parent = grown(core, 6)
    complete(core)
    child = opened(core)
    ops = [Op(Kind.FORK, child, 6, other=parent), Op(Kind.CONVERT, parent, paged=False)]
    assert not core.step(ops)
    core.set_limit(2)
    assert core.step(ops)
    core.check()


@pytest.mark.parametrize("parent_goes_on", [True, False])
def test_of_a_family_that_goes_on_in_one_step_one_keeps_the_shared_block(
    parent_goes_on: bool,
) -> None:
    """The parent if it goes on, whatever the order; and nobody while somebody waits."""
    core = rig(blocks_per_page=2)
    parent = grown(core, 6)
    complete(core)
    children = [opened(core, ones=6), opened(core, ones=7)]
    forks = [Op(Kind.FORK, child, 6, other=parent) for child in children]
    first = [parent] if parent_goes_on else []
    tail = core.model.seen.seqs[parent].blocks[1]
    assert core.step([*forks, *[Op(Kind.GROW, seq, 7) for seq in first + children]])
    core.check()
    assert core.core.stats().cow_blocks_total == 2
    holders = [s for s in [parent, *children] if core.model.seen.seqs[s].blocks[1] == tail]
    assert holders == [parent]
    complete(core)
    core.check()


def test_a_sequence_that_becomes_paged_grows_into_the_page_that_it_has() -> None:
    core = rig(blocks_per_page=4)
    seq = grown(core, 6, paged=False)
    complete(core)
    blocks = core.model.seen.seqs[seq].blocks
    assert core.step([Op(Kind.CONVERT, seq, paged=True), Op(Kind.GROW, seq, 11)])
    core.check()
    assert core.model.seen.seqs[seq].blocks == blocks[:3]


def test_compaction_moves_nothing_that_a_running_epoch_writes() -> None:
    core = rig(blocks_per_page=4)
    seqs = [grown(core, 5, salt=bytes([i])) for i in range(4)]
    complete(core)
    for seq in seqs[:3]:
        release(core, seq)
    grow(core, seqs[3], 7)
    core.compact()
    core.check()
    complete(core)
    core.compact()
    core.check()


def test_new_weights_find_nothing_of_the_old_ones_even_through_a_fork() -> None:
    core = rig()
    parent = grown(core, 9)
    complete(core)
    waiting = opened(core)
    core.clear_cache()
    core.check()
    assert core.match(waiting) == 0
    assert core.match(opened(core)) == 0
    grow(core, parent, 13)
    complete(core)
    child = opened(core)
    assert core.step([Op(Kind.FORK, child, 12, other=parent)])
    grow(core, child, 16)
    complete(core)
    release(core, parent)
    assert core.match(opened(core)) == 0


def test_a_slot_is_not_remapped_while_a_kernel_may_read_it() -> None:
    core = rig(limit_pages=4)
    first = grown(core, 12, paged=False)
    release(core, first)
    other = opened(core, 1, paged=False)
    assert not core.step([Op(Kind.GROW, other, 8)])  # one page is free, three wait
    core.check()
    complete(core)
    grow(core, other, 8)


def test_a_virtual_parent_goes_on_writing_beside_its_paged_child() -> None:
    core = rig(blocks_per_page=2)
    parent = grown(core, 6, paged=False)
    child = forked(core, parent, 5, ones=5)
    grow(core, parent, 9)
    grow(core, child, 9)
    complete(core)
    for paged in (True, False):
        for seq in (parent, child):
            assert core.step([Op(Kind.CONVERT, seq, paged=paged)])
            core.check()
            grow(core, seq, core.model.seqs[seq].length + 2)
    complete(core)


def test_a_window_gives_up_what_a_stay_in_the_virtual_view_brought_back() -> None:
    core = rig(blocks_per_page=4)
    seq = grown(core, 20)
    complete(core)
    grow(core, seq, 21, 9)  # blocks 0 and 1 are given up, and come back with their page
    for paged in (False, True):
        assert core.step([Op(Kind.CONVERT, seq, paged=paged)])
        core.check()
    grow(core, seq, 22, 13)


@pytest.mark.parametrize("first_token", [3, 4, 9, 10])
@pytest.mark.parametrize("paged", [True, False])
def test_a_window_moves_between_views_and_to_the_host_and_back(
    paged: bool, first_token: int
) -> None:
    core = rig(blocks_per_page=2)
    seq = grown(core, 10, paged=paged)
    complete(core)
    grow(core, seq, 11, first_token)
    complete(core)
    for _ in range(2):
        assert core.step([Op(Kind.SWAP_OUT, seq)])
        core.check()
        complete(core)
        assert core.step([Op(Kind.SWAP_IN, seq)])
        core.check()
        paged = not paged
        assert core.step([Op(Kind.CONVERT, seq, paged=paged)])
        core.check()
        complete(core)
    grow(core, seq, 17)
    release(core, seq)
    core.give_everything_back()


def test_eviction_leaves_the_rest_of_a_slot_that_a_kernel_may_read() -> None:
    core = rig(limit_pages=4, prefix_caching=False)
    seq = grown(core, 16, paged=False)
    complete(core)
    grow(core, seq, 16, 8)  # two pages are given up; the slot still shows them
    complete(core)
    grow(core, seq, 16)
    release(core, seq)
    other = opened(core)
    grow(core, other, 4)  # takes one of the two: the others wait
    complete(core)
    grow(core, other, 16)


def test_a_plan_that_packs_does_not_count_on_a_page_whose_gaps_packing_fills() -> None:
    memory = rig(blocks_per_page=4, limit_pages=3, prefix_caching=False)
    short = grown(memory, 8)  # blocks 0 and 1 of its page, the neighbour has the other two
    neighbour = grown(memory, 8)
    single = grown(memory, 4)  # alone in the second page
    long = grown(memory, 16, paged=False)  # the third
    complete(memory)
    release(memory, neighbour)
    complete(memory)
    # For the long one's page the single block moves into the gaps of the short one's page, which
    # then is no page to bind.
    assert not memory.step([Op(Kind.CONVERT, short, paged=False), Op(Kind.GROW, long, 20)])
    memory.check()
    assert memory.step([Op(Kind.CONVERT, short, paged=False)])
    memory.check()
    assert memory.core.stats().copied_blocks_total == 0
    assert memory.core.length(single) == 4


def test_an_epoch_in_which_nothing_was_written_takes_nothing_with_it() -> None:
    memory = rig()
    seq = grown(memory, 4)
    assert memory.step([Op(Kind.SWAP_OUT, seq)])
    complete(memory)  # complete, and not sealed: it is in host memory
    assert memory.step([Op(Kind.SWAP_IN, seq)])
    grow(memory, seq, 4)
    grow(memory, seq, 6)
    memory.abandon(memory.model.begun - 1)
    memory.check()
    complete(memory)
    assert memory.core.sealed(seq) == 6


def test_what_was_found_in_the_cache_can_be_attached_above_a_lowered_limit() -> None:
    memory = rig()
    seq = grown(memory, 20)
    complete(memory)
    grow(memory, seq, 21)
    memory.release(seq)
    memory.set_limit(1)  # the step that runs may read its pages
    complete(memory)
    newcomer = opened(memory)
    assert memory.match(newcomer) == 20
    assert not memory.plan([Op(Kind.ATTACH, newcomer, 20)]).fits
    assert memory.core.stats().committed_pages > 1
    assert not memory.plan([Op(Kind.GROW, newcomer, 8)]).fits
    assert memory.core.stats().committed_pages == 1
