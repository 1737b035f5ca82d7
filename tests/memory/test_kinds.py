"""Memories of several kinds of layers over one limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.memory.kinds import (
    KINDS,
    STATE,
    WHOLE_GROUPS,
    begin,
    blocks_of,
    do,
    grow,
    make_kinds,
    matched,
    opened,
    start,
    used_pages,
)
from tests.memory.model_types import Kind, Op
from tests.memory.rig import Fault, as_step
from tests.memory.support import PAGE, attach
from tests.memory.support import grow as grow_tuple
from vmserve import _core
from vmserve._core import Health, MapperMode
from vmserve.errors import DriverError, OutOfMemoryError

VIEWS = pytest.mark.parametrize("paged", [False, True])
PROMPT = list(range(1, 30))


def test_a_window_gives_its_past_up_alone() -> None:
    rig = make_kinds(prefix_caching=False, deferred_reclamation=False)
    seq = start(rig, range(1, 41), to=20)
    for to in range(21, 33):
        do(rig, grow(seq, to))
    dropped = [
        next(i for i, block in enumerate(blocks_of(rig, k, seq)) if block >= 0) for k in range(3)
    ]
    # The step to 32 tokens saw positions 26 to 31 and 21 to 31 of the windows of 6 and 11.
    assert dropped == [0, 26 // 4, 21 // 4]
    assert used_pages(rig) == [8, 8 - 6, 8 - 5]


def test_pages_idle_in_one_kind_serve_another() -> None:
    """What windows have left behind holds a second sequence, which one page of all layers would
    not."""
    rig = make_kinds(limit_pages=10, prefix_caching=False, num_slots=2)
    for first, last in ((1, 33), (50, 25)):
        seq = start(rig, range(first, first + 36), to=4)
        for to in range(8, last, 4):
            do(rig, grow(seq, to))
    # 8 and 6 pages of every layer would be 14 whole ones.
    assert rig.committed_bytes() <= 10 * WHOLE_GROUPS * PAGE
    assert sum(stats.pages_given_back_total for stats in rig.core.kind_stats()) > 0


@VIEWS
def test_a_hit_is_the_longest_prefix_on_which_all_kinds_agree(paged: bool) -> None:
    rig = make_kinds(limit_pages=32, num_slots=4)
    rig.release(start(rig, PROMPT, paged=paged))
    assert matched(rig, PROMPT) == 28
    # Without the window's last blocks, the others' prefix is of no use: both kinds lose it.
    assert (rig.trim(0, drop_idle=True) or 0) > 0
    assert matched(rig, PROMPT) == 0


def test_a_hit_takes_only_what_the_window_sees() -> None:
    rig = make_kinds(limit_pages=32, num_slots=4)
    rig.release(start(rig, PROMPT))
    seq = start(rig, PROMPT, paged=True)
    # 28 tokens were cached. After the 29th is computed, the 30th sees positions 24 and 19 on.
    assert [blocks_of(rig, k, seq).count(-1) for k in range(3)] == [0, 24 // 4, 19 // 4]


def test_a_plan_that_would_not_fit_gives_up_what_windows_have_behind() -> None:
    rig = make_kinds(limit_pages=5, prefix_caching=False)
    seq = start(rig, range(1, 41), to=16)
    used = used_pages(rig)
    assert rig.plan([grow(seq, 20)]).fits
    assert used_pages(rig) == used
    assert not rig.plan([grow(seq, 40)]).fits
    assert sum(used_pages(rig)) < sum(used)
    rig.check()


@VIEWS
def test_what_a_running_step_writes_is_cached_before_a_window_gives_it_up(paged: bool) -> None:
    """The next step is planned meanwhile, and sees nothing of it in the narrow windows."""
    rig = make_kinds(limit_pages=32, num_slots=4)
    seq = start(rig, range(1, 38), paged=paged, to=4)
    begin(rig, grow(seq, 24))
    epoch = begin(rig, grow(seq, 37))
    assert [blocks_of(rig, k, seq).count(-1) for k in range(3)] == [0, 0, 0]
    rig.complete(epoch - 1)
    rig.check()
    # The running step begins at 24 and sees 19 and 14 on.
    assert [blocks_of(rig, k, seq).count(-1) for k in range(3)] == [0, 19 // 4, 14 // 4]
    rig.complete(epoch)
    assert matched(rig, range(1, 19)) == 16


def test_an_epoch_ends_in_all_kinds_at_once() -> None:
    """When the last of their drivers says that the device has done its work."""
    rig = make_kinds(limit_pages=32, late_marks=True)
    seq = start(rig, range(1, 38), to=8)
    rig.launch(begin(rig, grow(seq, 24)))
    rig.check()


def test_a_plan_that_is_short_tells_that_running_steps_will_give_up_pages() -> None:
    rig = make_kinds(limit_pages=6, prefix_caching=False)
    seq = start(rig, range(1, 41), to=4)
    epoch = begin(rig, grow(seq, 20))
    short = rig.plan([grow(seq, 28)])
    assert not short.fits
    assert short.waiting_pages > 0
    rig.complete(epoch)
    assert rig.plan([grow(seq, 28)]).fits


def test_a_shortfall_of_one_kind_leaves_all_as_they_were() -> None:
    rig = make_kinds(limit_pages=4)
    seq = start(rig, range(1, 17))
    ops = [grow(seq, 40)]
    rig.plan(ops)  # gives up what windows have behind
    before = rig.core.fingerprint()
    plan = rig.plan(ops)
    assert not plan.fits
    assert plan.needed_pages > plan.available_pages
    assert rig.core.fingerprint() == before
    with pytest.raises(OutOfMemoryError, match="pages"):
        rig.core.apply_step(as_step(ops)[0], plan.version)
    rig.check()


def test_kinds_that_are_short_together_pack_their_blocks() -> None:
    """Each alone could have what it needs."""
    rig = make_kinds(blocks_per_page=2, limit_pages=3, prefix_caching=False)
    seq = start(rig, range(1, 41), paged=True, to=4)
    other = start(rig, range(50, 54), paged=True)
    do(rig, grow(seq, 8))  # its second block is not beside the first
    rig.release(other)
    do(rig, grow(seq, 24))
    assert rig.committed_bytes() == 3 * WHOLE_GROUPS * PAGE


def test_kinds_that_are_short_together_wait_for_their_mappers() -> None:
    ahead = {"mapper": MapperMode.MANUAL, "lookahead_tokens": 8, "grow_pages": 4}
    rig = make_kinds(limit_pages=4, prefix_caching=False, **ahead)
    seq, other = opened(rig, range(40)), opened(rig, range(40))
    assert rig.step([grow(seq, 4)])
    assert sum(stats.held_pages for stats in rig.core.kind_stats()) > 0
    assert rig.plan([grow(other, 12)]).fits


def test_a_lowered_limit_takes_the_oldest_pages_of_all_kinds() -> None:
    rig = make_kinds(limit_pages=16)
    for first in (1, 60):
        rig.release(start(rig, range(first, first + 16)))
    rig.set_limit(4)
    assert rig.committed_bytes() <= 4 * WHOLE_GROUPS * PAGE
    assert [matched(rig, range(first, first + 17)) for first in (1, 60)] == [0, 16]


@VIEWS
def test_who_needs_no_page_goes_on_above_a_lowered_limit(paged: bool) -> None:
    rig = make_kinds(limit_pages=16)
    seq = start(rig, range(1, 20), paged=paged, to=18)
    rig.set_limit(1)
    assert rig.committed_bytes() > WHOLE_GROUPS * PAGE
    do(rig, grow(seq, 19))
    assert not rig.plan([grow(seq, 29)]).fits


def test_pages_that_were_found_go_last_up_to_an_eighth() -> None:
    """A prompt that was found once outlives two others that were used later, in a pool so large
    that its pages are no more than an eighth."""
    rig = make_kinds(limit_pages=64, max_pages=64)
    for first in (*range(100, 240, 20), 1, 1, 60, 80):
        rig.release(start(rig, range(first, first + 17), paged=True))
    rig.trim(4, drop_idle=True)
    assert [matched(rig, range(first, first + 17)) for first in (1, 60, 80)] == [16, 0, 0]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_refusal_in_any_kind_undoes_all(kind: int) -> None:
    """Of each driver call of a step that maps, copies and forks."""
    for call in range(1, 100):
        rig = make_kinds(limit_pages=32, num_slots=4)
        parent = start(rig, range(1, 41), to=14)
        child = opened(rig, range(1, 19))
        ops = [Op(Kind.FORK, child, 14, other=parent), grow(child, 18), grow(parent, 18)]
        if rig.step(ops, Fault(call, kind=kind)):
            break
        rig.check()  # the parent is as it was
        assert (rig.core.length(child), rig.core.begun_epoch) == (0, 1)
        assert rig.core.stats().health is Health.HEALTHY
    assert call > 3


def test_a_failed_plan_is_not_applied_by_the_next() -> None:
    """Nor by one without ops, which plans of its own do not count."""
    rig = make_kinds(limit_pages=32)
    seq = start(rig, range(1, 13), to=8)
    ops = [Op(Kind.CONVERT, seq, paged=True), grow(seq, 12)]
    assert not rig.step(ops, Fault(1, forever=True, kind=1))
    do(rig)


# -- states


@VIEWS
def test_a_state_is_one_page_of_any_length(paged: bool) -> None:
    rig = make_kinds(has_state=True, limit_pages=32, num_slots=4)
    seq = start(rig, range(1, 41), paged=paged, to=5)
    [page] = blocks_of(rig, STATE, seq)
    for to in range(6, 41):
        do(rig, Op(Kind.CONVERT, seq, paged=paged or to >= 20), grow(seq, to))
        published = to - 1 in (8, 16, 24, 32, 36)
        [now] = blocks_of(rig, STATE, seq)
        assert (now != page) is published, to  # a checkpoint stays as it was
        page = now
    assert used_pages(rig)[STATE] == 1


def test_a_state_is_hit_at_its_checkpoints() -> None:
    rig = make_kinds(has_state=True, limit_pages=32, num_slots=4)
    prompt = list(range(1, 31))
    seq = opened(rig, prompt, paged=True)
    for to in (8, 15, 20, 28, 30):
        do(rig, grow(seq, to))
    # Steps ended at 8, a multiple, and 28, the last whole block before the last token; at 20, too,
    # which is neither.
    assert [matched(rig, prompt[:n]) for n in (30, 29, 28, 9, 8)] == [28, 28, 8, 8, 0]
    start(rig, prompt[:29])
    assert rig.core.kind_stats()[STATE].cow_blocks_total == 3  # behind 8, 28 and the hit


def test_a_state_that_the_next_step_overwrites_is_no_checkpoint() -> None:
    """Steps that are begun before the one before them is complete."""
    rig = make_kinds(has_state=True, limit_pages=32)
    seq = opened(rig, range(1, 13), paged=True)
    epoch = [begin(rig, grow(seq, to)) for to in (8, 12)][-1]
    rig.complete(epoch)
    assert matched(rig, range(1, 13)) == 0


def test_sequences_that_share_a_state_write_to_copies() -> None:
    rig = make_kinds(has_state=True, limit_pages=32, num_slots=4)
    parent = start(rig, range(1, 15), to=10)
    child = opened(rig, [*range(1, 11), 7, 7])
    do(rig, Op(Kind.FORK, child, 10, other=parent), grow(child, 12), grow(parent, 11))
    assert blocks_of(rig, STATE, child) != blocks_of(rig, STATE, parent)
    again = opened(rig, [])
    with pytest.raises(ValueError, match="its state is that of 11"):
        rig.plan([Op(Kind.FORK, again, 10, other=parent)])


def test_a_state_takes_no_drafts() -> None:
    rig = make_kinds(has_state=True, limit_pages=32)
    seq = start(rig, range(1, 15), to=10)
    with pytest.raises(ValueError, match="rejected drafts"):
        rig.core.plan_step(np.array([[seq, 12, 0, 1]]))


# -- the memory as a whole


def test_gauges_of_kinds_are_those_of_all_of_them() -> None:
    """In blocks and pages of all layers; a state counts as as many bytes."""
    rig = make_kinds(has_state=True, limit_pages=32, swap_blocks=8)
    first = start(rig, [3] * 20)
    second = start(rig, [3] * 20 + [4], paged=True)
    do(rig, Op(Kind.SWAP_OUT, first))
    parts, stats = rig.core.kind_stats(), rig.core.stats()
    for name in ("used", "shared", "cached", "swap", "swap_capacity", "copying"):
        name += "_blocks"
        num_bytes = sum(getattr(part, name) * part.page_bytes for part in parts)
        assert getattr(stats, name) == num_bytes // (WHOLE_GROUPS * PAGE), name
    assert (stats.swap_capacity_blocks, parts[0].swap_capacity_blocks) == (10, 8)
    assert stats.num_seqs == parts[0].num_seqs == 2
    assert stats.used_tokens == parts[0].used_tokens
    assert stats.num_mappings == sum(part.num_mappings for part in parts)
    assert stats.free_mappings == min(part.free_mappings for part in parts)
    assert rig.core.open_seqs() == [first, second]


def test_bad_kinds_are_refused() -> None:
    driver = _core.HostDriver(PAGE, 64)
    kind: dict[str, Any] = {"driver": driver, "num_groups": 1, "max_pages": 8, "token_bytes": PAGE}
    common: dict[str, Any] = {"block_tokens": 1, "blocks_per_page": 1, "max_seqs": 1}
    common |= {"num_slots": 1, "max_len": 8}
    for others, limit, told in (
        ([{"driver": None}], 4, "no driver"),
        ([{}, {"num_groups": 0}], 4, "must be positive"),
        ([{}, {"max_seqs": 2}], 4, "equal pages"),
        ([{"window": 2}, {}], 4, "sees all positions"),
        ([{}], 2**52 + 8, "between 1 and 8"),
        ([], 4, "at least one kind"),
        ([{}, {"state_bytes": 64 * PAGE}], 4, "does not hold a page of 262,144 bytes"),
    ):
        if others and others[-1].get("state_bytes"):
            others[-1]["driver"] = _core.HostDriver(64 * PAGE, 8)
        with pytest.raises(ValueError, match=told):
            _core.KVMemory([kind | own for own in others], limit, **common)
    memory = _core.KVMemory([kind], 4, **common)
    for call in (
        lambda: memory.block_tables(1),
        lambda: memory.blocks(0, 1),
        lambda: memory.restore(memory.open(), [attach(99, 1)]),
        lambda: memory.plan([(*attach(0, 1)[:3], 400, *attach(0, 1)[4:])]),
        lambda: memory.keep(np.array([0]), np.array([2**63 - 1])),
    ):
        with pytest.raises(ValueError, match=r"outside|not open|does not have|was not grown"):
            call()
    seq = 0
    memory.complete(memory.apply([grow_tuple(seq, 4)], memory.plan([grow_tuple(seq, 4)]).version))
    memory.release(seq)
    idle = memory.stats().idle_pages
    assert memory.trim(2**52, drop_idle=True) == 0
    assert memory.stats().idle_pages == idle == 4


@pytest.mark.parametrize("call", range(1, 16))
def test_a_refusal_while_a_memory_is_made_leaves_none(call: int) -> None:
    try:
        rig = make_kinds(
            refused_call=call, num_slots=2, max_pages=16, limit_pages=8, null_page=True
        )
    except (DriverError, OutOfMemoryError):
        return
    assert not any(part.faults.num_refused for part in rig.parts)
    rig.check()
