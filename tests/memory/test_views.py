"""Blocks and pages under two views: sharing, copies on write, conversion, prefixes, swap."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest

from tests.memory.support import (
    BLOCK_TOKENS,
    Memory,
    attach,
    convert,
    fork,
    grow,
    make_memory,
    swap_in,
    swap_out,
)
from vmserve import _core
from vmserve._core import View
from vmserve.errors import OutOfMemoryError

PROMPT = list(range(1, 31))
VIEWS = [View.VIRTUAL, View.PAGED]


@pytest.mark.parametrize("size", [0, 1, 55, 56, 63, 64, 65, 119, 120, 1000])
def test_sha256_is_sha256(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert _core.sha256(data) == hashlib.sha256(data).digest()


def test_short_paged_sequences_share_a_page_and_long_ones_take_whole_pages() -> None:
    memory = make_memory(blocks_per_page=4, max_len=64)
    a, b, c = (memory.open(view=View.PAGED) for _ in range(3))
    memory.do(grow(a, 5), grow(b, 3), grow(c, 16))
    # 2 + 1 + 4 blocks in two pages: nobody has a page alone.
    assert memory.blocks(a) + memory.blocks(b) + memory.blocks(c) == list(range(7))
    assert (memory.stat("used_pages"), memory.stat("split_pages")) == (2, 1)
    memory.do(grow(c, 33))
    assert memory.blocks(c)[4:] == [8, 9, 10, 11, 12]  # from block index 4 on, page by page
    memory.do(grow(b, 9))
    assert memory.blocks(b) == [2, 7, 16]  # the last gap of a split page, then another one
    memory.core.check()


def test_tenants_never_share_a_page() -> None:
    memory = make_memory(blocks_per_page=4)
    a, b = memory.open(view=View.PAGED, tenant=1), memory.open(view=View.PAGED, tenant=2)
    memory.do(grow(a, 4), grow(b, 4))
    assert {memory.blocks(a)[0] // 4, memory.blocks(b)[0] // 4} == {0, 1}


@pytest.mark.parametrize("blocks_per_page", [1, 4])
def test_a_paged_fork_copies_when_it_writes(blocks_per_page: int) -> None:
    memory = make_memory(blocks_per_page=blocks_per_page)
    parent = memory.start(PROMPT[:10], View.PAGED)
    children = [memory.open(view=View.PAGED) for _ in range(2)]
    memory.do(*(fork(child, parent, 10) for child in children))
    assert memory.blocks(children[0]) == memory.blocks(children[1]) == memory.blocks(parent)
    assert memory.core.block_refs(memory.blocks(parent)[2]) == 3
    assert memory.stat("copied_blocks_total") == 0
    memory.do(grow(children[0], 11))
    memory.write(children[0], 10, [77])
    assert memory.stat("cow_blocks_total") == 1
    memory.release(parent)
    memory.do(grow(children[1], 11))  # the last holder writes in place
    memory.write(children[1], 10, [88])
    assert memory.stat("cow_blocks_total") == 1
    assert memory.read(children[0]) == [*PROMPT[:10], 77]
    assert memory.read(children[1]) == [*PROMPT[:10], 88]
    assert memory.blocks(children[0])[:2] == memory.blocks(children[1])[:2]
    memory.core.check()


@pytest.mark.parametrize("blocks_per_page", [1, 2, 4])
@pytest.mark.parametrize("child_view", VIEWS)
@pytest.mark.parametrize("parent_view", VIEWS)
@pytest.mark.parametrize("num_tokens", [0, 3, 4, 16, 17, 22])
def test_forks_read_what_their_parent_wrote_and_then_their_own(
    parent_view: View, child_view: View, blocks_per_page: int, num_tokens: int
) -> None:
    memory = make_memory(blocks_per_page=blocks_per_page, limit_pages=32)
    parent = memory.start(PROMPT[:22], parent_view)
    child = memory.open(view=child_view)
    memory.do(fork(child, parent, num_tokens))
    epoch = memory.begin(grow(child, num_tokens + 5), grow(parent, 25))
    own = [101, 102, 103, 104, 105]
    memory.write(child, num_tokens, own)
    memory.write(parent, 22, [90, 91, 92])
    memory.core.complete(epoch)
    memory.core.check()
    assert memory.read(parent) == [*PROMPT[:22], 90, 91, 92]
    for _ in range(2):
        assert memory.read(child) == PROMPT[:num_tokens] + own
        memory.release(*memory.seqs & {parent})
    assert memory.stat("forks_total") == 1


@pytest.mark.parametrize("blocks_per_page", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 8, 15, 16, 29])
def test_a_running_sequence_changes_its_view_and_back(blocks_per_page: int, length: int) -> None:
    memory = make_memory(blocks_per_page=blocks_per_page, limit_pages=32)
    others = memory.start([9], View.PAGED)  # a split page is there
    seq = memory.start(PROMPT[:length])
    before = memory.blocks(seq)
    copied = memory.stat("copied_blocks_total")
    memory.do(convert(seq, View.PAGED))
    assert memory.blocks(seq) == before[: -(-length // BLOCK_TOKENS)]  # the same blocks
    assert memory.read(seq) == PROMPT[:length]
    memory.do(convert(seq, View.VIRTUAL))
    assert memory.blocks(seq) == before  # and back: nothing was copied either way
    assert memory.stats("copied_blocks_total", "converted_zero_copy_total") == (copied, 2)
    memory.step(seq, length, [99])
    assert memory.read(seq) == [*PROMPT[:length], 99]
    memory.release(others)
    memory.core.check()


def test_blocks_that_do_not_fill_pages_in_order_are_copied() -> None:
    memory = make_memory(blocks_per_page=4)
    memory.start([9], View.PAGED)
    seq = memory.start(PROMPT[:30], View.PAGED)
    # Its first blocks lie in the other's split page; from block 4 on it has pages of its own.
    assert memory.blocks(seq)[4:] == [8, 9, 10, 11]
    memory.do(convert(seq, View.VIRTUAL))
    assert memory.pages(seq)[1] == 2
    assert memory.stat("copied_blocks_total") == 4
    assert memory.read(seq) == PROMPT
    memory.core.check()


@pytest.mark.parametrize("blocks_per_page", [1, 2, 4])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("first_view", VIEWS)
def test_a_prefix_is_found_under_both_views(
    first_view: View, view: View, blocks_per_page: int
) -> None:
    memory = make_memory(blocks_per_page=blocks_per_page, limit_pages=32)
    first = memory.start(PROMPT[:22], first_view)
    seq = memory.open([*PROMPT[:18], 60, 61, 62], view)
    assert memory.core.match(seq) == 16  # whole blocks only
    epoch = memory.begin(attach(seq, 16), grow(seq, 21))
    assert (memory.core.length(seq), memory.core.sealed(seq)) == (21, 16)
    memory.write(seq, 16, [*PROMPT[16:18], 60, 61, 62])
    memory.core.complete(epoch)
    assert memory.read(seq) == [*PROMPT[:18], 60, 61, 62]
    assert memory.read(first) == PROMPT[:22]
    assert memory.stat("prefix_hit_blocks_total") == 4
    memory.core.check()
    # What has ended is found as well, and its own new blocks, too.
    memory.release(first, seq)
    third = memory.open([*PROMPT[:18], 60, 61, 62], view)
    assert memory.core.match(third) == 20
    memory.do(attach(third, 20))
    assert memory.read(third) == [*PROMPT[:18], 60, 61]
    memory.core.check()


def test_a_prompt_that_is_cached_whole_computes_its_last_token_again() -> None:
    memory = make_memory()
    memory.release(memory.start(PROMPT[:8]))
    assert memory.core.match(memory.open(PROMPT[:8])) == 4
    assert memory.core.match(memory.open(PROMPT[:9])) == 8


def test_what_a_prefix_is_found_by() -> None:
    memory = make_memory(max_seqs=16)
    memory.start(PROMPT[:9])
    seekers: list[tuple[int, dict[str, Any]]] = [
        (8, {"tokens": PROMPT[:9]}),
        (0, {"tokens": PROMPT[:9], "salt": b"pepper"}),
        (0, {"tokens": PROMPT[:9], "tenant": 1}),
        (0, {"tokens": [0, *PROMPT[1:9]]}),
        (4, {"tokens": [*PROMPT[:5], 0, *PROMPT[6:9]]}),
        (0, {}),
    ]
    for expected, whose in seekers:
        assert memory.core.match(memory.open(**whose)) == expected, whose
    memory.core.clear_cache()
    assert memory.core.match(memory.open(PROMPT[:9])) == 0
    memory.core.check()


def test_generated_tokens_are_cached_too() -> None:
    memory = make_memory()
    seq = memory.start(PROMPT[:6])
    for position in range(6, 13):
        memory.core.append_tokens([seq], [PROMPT[position]])
        memory.step(seq, position, [PROMPT[position]])
    memory.release(seq)
    again = memory.open([*PROMPT[:13], 50])
    assert memory.core.match(again) == 12
    memory.do(attach(again, 12))
    assert memory.read(again) == PROMPT[:12]


def test_without_prefix_caching_nothing_is_found() -> None:
    memory = make_memory(prefix_caching=False)
    memory.release(memory.start(PROMPT[:9]))
    assert memory.core.match(memory.open(PROMPT[:9])) == 0
    assert memory.stat("cached_blocks") == 0


def test_the_oldest_prefix_goes_first_and_its_tail_before_its_head() -> None:
    memory = make_memory(limit_pages=6, num_slots=6)
    old, new = PROMPT[:12], [t + 100 for t in PROMPT[:12]]
    memory.release(memory.start(old), memory.start(new))
    matches = []
    for taken in (4, 8, 16, 24):
        seq = memory.grown(taken)
        probes = [memory.open([*tokens, 0]) for tokens in (old, new)]
        matches.append(tuple(memory.core.match(probe) for probe in probes))
        memory.release(seq, *probes)
        memory.core.check()
    # One page, then two, four, six are wanted; what was given up last is taken first.
    assert matches == [(8, 12), (4, 12), (0, 8), (0, 0)]


def test_what_is_only_mapped_goes_before_what_is_cached() -> None:
    memory = make_memory(limit_pages=6, num_slots=6)
    memory.release(memory.start(PROMPT[:12]))  # three cached pages, the oldest
    nameless = memory.grown(12)
    memory.release(nameless)  # three that its slot shows, and nobody will find
    memory.core.check()
    taken = memory.grown(12)
    memory.core.check()
    assert memory.core.match(memory.open([*PROMPT[:12], 0])) == 12
    memory.do(grow(taken, 16))
    assert memory.core.match(memory.open([*PROMPT[:12], 0])) == 8


def test_the_next_chat_turn_adopts_its_slot() -> None:
    memory = make_memory(blocks_per_page=2, max_len=64, limit_pages=32)
    turn = PROMPT[:21]
    seq = memory.start(turn)
    slot = memory.core.slot(seq)
    other = memory.start([t + 100 for t in PROMPT[:10]])
    memory.release(seq, other)
    mapped = memory.stat("map_calls_total")
    again = memory.open([*turn, 40, 41])
    memory.do(attach(again, memory.core.match(again)), grow(again, 23))
    assert memory.core.slot(again) == slot
    assert memory.read(again, 0, 20) == turn[:20]
    stats = memory.core.stats()
    assert stats.map_calls_total == mapped  # no map,
    assert stats.copied_blocks_total == 0  # no copy
    assert stats.adopted_slots_total == 1
    memory.core.check()


@pytest.mark.parametrize(("view", "given_up"), [(View.VIRTUAL, 4), (View.PAGED, 5)])
def test_a_window_gives_up_what_lies_behind_it(view: View, given_up: int) -> None:
    memory = make_memory(blocks_per_page=2, null_page=True)
    seq = memory.start(PROMPT[:28], view)
    memory.do(grow(seq, 29, 21))
    assert memory.blocks(seq)[:4] == [-1] * 4
    assert memory.blocks(seq).count(-1) == given_up
    assert (memory.core.block_tables()[seq, :4] == 0).all()
    assert memory.stat("used_pages") == 2
    assert memory.read(seq, 20, 28) == PROMPT[20:28]
    memory.core.check()


def one_block_in_each_page(limit_pages: int) -> tuple[Memory, list[int]]:
    """Three sequences of a block, each in a page of four of which the others are gone."""
    memory = make_memory(blocks_per_page=4, max_seqs=16, limit_pages=limit_pages)
    seqs = [memory.start([50 + i] * 4, View.PAGED) for i in range(12)]
    memory.release(*(seq for i, seq in enumerate(seqs) if i % 4))
    return memory, seqs[::4]


def test_split_pages_are_packed() -> None:
    memory, seqs = one_block_in_each_page(16)
    assert memory.stat("used_pages") == 3
    assert memory.core.compact() == 2
    assert memory.stats("used_pages", "compacted_blocks_total") == (1, 2)
    assert [memory.read(seq) for seq in seqs] == [[50] * 4, [54] * 4, [58] * 4]
    memory.core.check()


def test_a_full_pool_packs_split_pages_for_a_whole_one() -> None:
    memory, seqs = one_block_in_each_page(3)
    memory.core.clear_cache()
    memory.do(grow(memory.open(), 32))  # two of three pages, each of which had a block in use
    assert memory.stat("compactions_total") == 1
    assert [memory.read(seq) for seq in seqs] == [[50] * 4, [54] * 4, [58] * 4]
    memory.core.check()


def test_adjacent_blocks_are_swapped_in_one_run_of_each_group() -> None:
    memory = make_memory(blocks_per_page=4, swap_blocks=20)
    memory.do(swap_out(memory.start(PROMPT[:30])))
    assert memory.stat("swap_copy_runs_total") == 2


@pytest.mark.parametrize("blocks_per_page", [1, 4])
@pytest.mark.parametrize("view", VIEWS)
def test_swapping_out_and_in_keeps_every_byte(view: View, blocks_per_page: int) -> None:
    memory = make_memory(blocks_per_page=blocks_per_page, swap_blocks=20, limit_pages=32)
    seq = memory.start(PROMPT[:22], view)
    twin = memory.open(view=view)
    memory.do(fork(twin, seq, 18))
    memory.do(swap_out(seq), swap_out(twin))
    assert memory.core.swapped(seq)
    assert (memory.stat("used_pages"), memory.stat("used_slots")) == (0, 0)
    # What the two share is copied once (paged: five blocks, of which the tail is still shared).
    assert memory.stat("swap_blocks") == (7 if view is View.VIRTUAL else 6)
    with pytest.raises(ValueError, match="is swapped out"):
        memory.core.plan([grow(seq, 23)])
    memory.release(memory.start([t + 100 for t in PROMPT]))  # others use the memory meanwhile
    memory.do(swap_in(twin), swap_in(seq))
    assert memory.read(seq) == PROMPT[:22]
    assert memory.read(twin) == PROMPT[:18]
    assert memory.stat("swap_blocks") == 0
    memory.step(seq, 22, [7], grow(twin, 19))
    memory.core.check()


def test_too_small_a_swap_space_is_a_value() -> None:
    memory = make_memory(swap_blocks=3)
    seq = memory.start(PROMPT[:22])
    plan = memory.core.plan([swap_out(seq)])
    assert (plan.fits, plan.missing_swap_blocks) == (False, 3)
    with pytest.raises(OutOfMemoryError, match="3 swap blocks"):
        memory.core.apply([swap_out(seq)], plan.version)
    assert memory.read(seq) == PROMPT[:22]


def test_a_prefix_that_is_not_cached_any_more_is_a_value() -> None:
    """And nothing of the plan is counted, or changed, or applied."""
    memory = make_memory()
    memory.release(memory.start(PROMPT[:10]))
    seq = memory.open(PROMPT[:12])
    assert memory.core.match(seq) == 8
    memory.core.trim(0, drop_idle=True)
    before = memory.core.fingerprint()
    plan = memory.core.plan([attach(seq, 8), grow(seq, 12)])
    assert (plan.fits, plan.lost_prefixes, plan.needed_pages) == (False, 1, 0)
    assert memory.core.fingerprint() == before
    with pytest.raises(ValueError, match="the plan is stale"):
        memory.core.apply([attach(seq, 8), grow(seq, 12)], plan.version)
    assert memory.core.fingerprint() == before
    assert memory.core.plan([grow(seq, 12)]).fits


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ([attach(0, 4)], "sequence 0 is not empty"),
        ([attach(1, 3)], "whole blocks of 4 tokens, not 3"),
        ([fork(1, 0, 11)], "cannot fork sequence 0 at 11 tokens: it holds 10"),
        ([fork(2, 0, 8)], "a fork must have its parent's tenant"),
        ([fork(0, 0, 8)], "sequence 0 is not empty"),
        ([swap_in(0)], "sequence 0 is not swapped out"),
        ([convert(0, View.PAGED), swap_out(0)], "sequence 0 has two ops in one plan"),
        ([swap_out(0), grow(0, 12)], "sequence 0 is swapped out"),
        ([convert(0, View.PAGED), fork(1, 0, 8)], "or changes in the same plan"),
        ([grow(0, 12, 13)], "cannot drop tokens that it does not have"),
        ([grow(4, 4)], "sequence 4 is not open"),
        ([grow(8, 4)], r"sequence 8 is outside 0 \.\. 7"),
        ([grow(-1, 4)], r"sequence -1 is outside 0 \.\. 7"),
        ([grow(0, 33)], "sequence 0 cannot hold 33 tokens: max_len is 32"),
        ([grow(0, -1)], "sequence 0 cannot hold -1 tokens"),
        # Another slot would leave the first without a sequence.
        ([attach(3, 8)], "sequence 3 is not empty"),
        ([fork(3, 0, 8)], "sequence 3 is not empty"),
    ],
)
def test_wrong_ops_are_refused(ops: list[object], message: str) -> None:
    memory = make_memory(swap_blocks=20)
    memory.start(PROMPT[:10])
    memory.open(PROMPT[:12])
    memory.open(tenant=1)
    memory.do(grow(memory.open([3] * 9), 0))  # a slot, and no page
    with pytest.raises(ValueError, match=message):
        memory.core.plan(ops)  # type: ignore[arg-type]
    memory.core.check()


def test_groups_are_checked() -> None:
    core = make_memory().core
    for buffer in (core.slots_buffer, core.arena_buffer, core.shadow_buffer):
        with pytest.raises(ValueError, match=r"group 2 is outside 0 \.\. 1"):
            buffer(2)
