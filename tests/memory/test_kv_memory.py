"""Slots, arena and pool: exact page ids, aliasing, limits, and the ledger after each call.

Pages of one block here, without prefix cache; what several blocks a page and sharing add is in
test_views.py, what time adds in test_epochs.py.
"""

from __future__ import annotations

import gc
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import run_python
from tests.memory.support import BLOCK_TOKENS, GROUPS, PAGE, areas, fork, grow, make_memory
from vmserve._core import ZeroPolicy
from vmserve.errors import OutOfMemoryError

TOKEN_BYTES = PAGE // BLOCK_TOKENS


def test_sequences_and_slots_are_handed_out_lowest_first() -> None:
    memory = make_memory(num_slots=2, max_seqs=3)
    assert [memory.core.open() for _ in range(4)] == [0, 1, 2, None]
    memory.do(grow(1, 1), grow(2, 1))
    assert [memory.core.slot(seq) for seq in (0, 1, 2)] == [None, 0, 1]
    plan = memory.core.plan([grow(0, 1)])
    assert (plan.fits, plan.missing_slots, plan.needed_pages) == (False, 1, 1)
    memory.core.release(1)
    assert memory.core.open() == 1
    assert memory.core.slots([0, 2]).tolist() == [-1, 1]
    memory.do(grow(0, 0))  # a slot without a page
    assert (memory.core.slot(0), memory.blocks(0)) == (0, [])


def test_pages_are_adjacent_where_they_can_be_and_lowest_otherwise() -> None:
    memory = make_memory()
    a, b = memory.open(), memory.open()
    memory.do(grow(a, 5), grow(b, 4))
    assert (memory.blocks(a), memory.blocks(b)) == ([0, 1], [2])
    memory.do(grow(a, 9))
    memory.do(grow(b, 8))
    assert (memory.blocks(a), memory.blocks(b)) == ([0, 1, 3], [2, 4])
    memory.core.check()


def test_growing_commits_in_chunks_up_to_the_limit() -> None:
    memory = make_memory(grow_pages=4, limit_pages=6)
    seq = memory.open()
    committed = []
    for num_tokens in (1, 16, 17, 24):
        memory.do(grow(seq, num_tokens))
        committed.append((memory.stat("committed_pages"), memory.stat("free_pages")))
    assert committed == [(4, 3), (4, 0), (6, 1), (6, 0)]
    assert memory.stat("memfd_allocated_bytes") == 6 * GROUPS * PAGE


def test_a_slot_and_the_arena_show_the_same_bytes() -> None:
    memory = make_memory()
    other, seq = memory.open(), memory.open()
    epoch = memory.begin(grow(other, 4), grow(seq, 12))
    assert memory.blocks(seq) == [1, 2, 3]
    memory.write(seq, 0, range(12))
    memory.core.complete(epoch)  # written from the arena only from here on
    for position in range(12):
        for group in range(GROUPS):
            in_arena = memory.in_arena(memory.blocks(seq)[position // 4], group, position)
            assert (in_arena == position ^ 128 * group).all()
            in_arena[:] = 50 + position ^ 128 * group  # and the other way round
    assert memory.read(seq) == list(range(50, 62))
    assert memory.read(other, 0, 0) == []
    assert not memory.slot_bytes(other)[:PAGE].any()


def test_growth_never_shrinks_and_merges_repeated_growths() -> None:
    memory = make_memory()
    seq = memory.open()
    growths = (grow(seq, 5), grow(seq, 13), grow(seq, 2))
    assert memory.core.plan(growths).needed_pages == 4
    memory.do(*growths)
    memory.do(grow(seq, 1))
    assert (memory.core.length(seq), len(memory.blocks(seq))) == (13, 4)
    memory.do()
    memory.do(grow(seq, 0))
    memory.core.check()


def test_plan_is_read_only_and_counts_what_is_missing() -> None:
    memory = make_memory(limit_pages=3)
    a, b = memory.open(), memory.open()
    ops, before = [grow(a, 8), grow(b, 9)], memory.state()
    plan = memory.core.plan(ops)
    assert (plan.needed_pages, plan.available_pages, plan.fits) == (5, 3, False)
    with pytest.raises(OutOfMemoryError, match="the plan needs 5 pages, 3 can be had"):
        memory.core.apply(ops, plan.version)
    assert memory.state() == before
    memory.do(grow(a, 8))
    plan = memory.core.plan(ops)
    assert (plan.needed_pages, plan.available_pages) == (3, 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"limit_pages": 40}, ValueError, "limit_pages is 40: it must lie between 1 and 32"),
        ({"num_slots": 0}, ValueError, "must be positive"),
        ({"colour": 1}, TypeError, "unknown argument: colour"),
        ({"max_pages": 5, "limit_pages": 4, "num_frames": 8}, ValueError,
         "2 groups of 5 pages need more"),
        ({"token_bytes": 512}, ValueError, "a page of 4 tokens of 512 bytes is not the driver's"),
    ],
)  # fmt: skip
def test_wrong_configurations_are_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_memory(**options)


def test_statistics_after_each_step() -> None:
    memory = make_memory(limit_pages=8, grow_pages=2, prefix_caching=False)
    seq = memory.grown(5)
    stats = memory.core.stats()
    # Other memories of the process take mappings, too.
    names = stats.as_dict().keys() - {"free_mappings"}
    expected: dict[str, Any] = dict.fromkeys(names, 0)

    def changes(**changed: Any) -> None:
        stats = memory.core.stats()
        expected.update(changed)
        assert {name: getattr(stats, name) for name in expected} == expected

    changes(
        page_bytes=GROUPS * PAGE, page_tokens=4, block_tokens=4, blocks_per_page=1, limit_pages=8,
        committed_pages=2, used_pages=2, used_blocks=2, num_slots=4, used_slots=1, num_seqs=1,
        virtual_seqs=1, used_tokens=5, tail_waste_bytes=3 * TOKEN_BYTES * GROUPS,
        pages_mapped_total=2, pages_committed_total=2, map_calls_total=GROUPS,
        access_calls_total=GROUPS,  # page 0 is sealed
        unhidden_calls_total=3 * GROUPS, arena_map_calls_total=GROUPS,
        memfd_allocated_bytes=2 * GROUPS * PAGE, num_mappings=5 * GROUPS,
        map_seconds_total=stats.map_seconds_total,
    )  # fmt: skip
    assert stats.map_seconds_total > 0
    memory.release(seq)
    changes(
        used_pages=0, idle_pages=2, used_blocks=0, used_slots=0, parked_slots=1, parked_pages=2,
        num_seqs=0, virtual_seqs=0, used_tokens=0, tail_waste_bytes=0,
    )  # fmt: skip
    assert memory.core.trim(0, drop_idle=True) == 2
    changes(
        committed_pages=0, idle_pages=0, parked_slots=0, parked_pages=0, pages_unmapped_total=2,
        pages_given_back_total=2, memfd_allocated_bytes=0, num_mappings=2 * GROUPS,
        unmap_calls_total=2 * GROUPS,  # evicted one by one, tail first
        unhidden_calls_total=5 * GROUPS,
    )  # fmt: skip


def test_trim_gives_back_the_highest_free_pages() -> None:
    memory = make_memory(deferred_reclamation=False, prefix_caching=False)
    a, b, c = (memory.open() for _ in range(3))
    memory.do(grow(a, 8), grow(b, 8), grow(c, 8))
    memory.release(a, c)
    assert memory.stat("free_pages") == 4
    assert memory.core.trim(keep_pages=3) == 1
    assert memory.stat("memfd_allocated_bytes") == 5 * GROUPS * PAGE
    assert memory.core.trim(keep_pages=1) == 2
    memory.core.check()
    a = memory.grown(12)  # page 0 was kept, 1 and 4 come into being again
    assert memory.blocks(a) == [0, 1, 4]
    memory.do(grow(b, 12))
    assert memory.blocks(b) == [2, 3, 5]
    assert not memory.slot_bytes(a)[: 3 * PAGE].any()
    memory.core.check()


def test_the_limit_can_change_while_sequences_run() -> None:
    memory = make_memory(limit_pages=8)
    a, b = memory.open(), memory.open()
    memory.do(grow(a, 16), grow(b, 8))
    memory.release(b)
    memory.core.set_limit(3)
    # What is free or idle goes at once; what a holds stays until it is released.
    assert (memory.stat("committed_pages"), memory.stat("limit_pages")) == (4, 3)
    plan = memory.core.plan([grow(a, 17)])
    assert (plan.needed_pages, plan.available_pages) == (1, 0)
    memory.release(a)
    memory.core.set_limit(3)
    assert (memory.stat("committed_pages"), memory.stat("idle_pages")) == (3, 3)
    memory.core.set_limit(32)
    c = memory.grown(32)
    assert len(set(memory.blocks(c))) == 8
    memory.core.check()
    with pytest.raises(ValueError, match="the limit of 33 pages must lie between 1 and 32"):
        memory.core.set_limit(33)


def test_read_slack_keeps_pages_mapped_beyond_the_length() -> None:
    memory = make_memory(read_slack=5, max_len=8)
    seq = memory.grown(3)  # 3 + 5 tokens
    assert memory.blocks(seq) == [0, 1]
    memory.do(grow(seq, 8))
    assert memory.blocks(seq) == [0, 1, 2, 3]
    assert not memory.slot_bytes(seq, 1)[: 13 * TOKEN_BYTES].any()
    assert memory.core.plan([grow(memory.open(), 0)]).needed_pages == 0


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    ("policy", "second_tenant", "expected", "zeroed"),
    [
        (ZeroPolicy.ALWAYS, 7, 0, 1),
        (ZeroPolicy.ALWAYS, 8, 0, 1),
        (ZeroPolicy.TENANT, 7, 66, 0),
        (ZeroPolicy.TENANT, 8, 0, 1),
        (ZeroPolicy.NEVER, 8, 66, 0),
    ],
)
def test_zero_policy(
    policy: ZeroPolicy, second_tenant: int, expected: int, zeroed: int, deferred: bool
) -> None:
    memory = make_memory(zero_policy=policy, deferred_reclamation=deferred, limit_pages=2)
    first = memory.open(tenant=7)
    epoch = memory.begin(grow(first, 4))
    for group in range(GROUPS):
        memory.slot_bytes(first, group)[:PAGE] = 66
    memory.core.complete(epoch)
    memory.release(first)
    second = memory.grown(8, tenant=second_tenant)
    assert 0 in memory.blocks(second)
    dirty = memory.blocks(second).index(0) * PAGE
    for group in range(GROUPS):
        shown = memory.slot_bytes(second, group)
        assert (shown[dirty : dirty + PAGE] == expected).all()
        assert not shown[PAGE - dirty : 2 * PAGE - dirty].any()  # never used before
    assert memory.stat("pages_zeroed_total") == zeroed


def test_a_page_that_came_back_from_the_system_is_not_zeroed_again() -> None:
    memory = make_memory()
    seq = memory.start(range(1, 9))
    memory.release(seq)
    memory.core.trim(0, drop_idle=True)
    memory.do(grow(memory.open(), 8))
    assert not memory.slot_bytes(seq)[: 2 * PAGE].any()
    assert memory.stat("pages_zeroed_total") == 0


def pool_pss_bytes() -> int:
    """Of all memory of pools in this process; what else comes and goes in it does not count."""
    return 1024 * sum(area.kib["Pss:"] for area in areas() if "memfd:vmserve-kv" in area.line)


def test_memory_follows_mapping_and_trim() -> None:
    pages = 4096
    memory = make_memory(
        num_slots=1, max_seqs=1, max_len=4 * pages, limit_pages=pages, max_pages=pages
    )
    num_bytes = pages * GROUPS * PAGE  # 32 MiB
    seq = memory.open()
    before = pool_pss_bytes()
    memory.do(grow(seq, 4 * pages - 1))
    for group in range(GROUPS):
        memory.slot_bytes(seq, group)[-PAGE:] = 1
        memory.core.arena_buffer(group)[:, 0] += 0  # every page, seen from here too
        assert memory.core.arena_buffer(group)[pages - 1].all()
    assert memory.stat("memfd_allocated_bytes") == num_bytes
    # Seen through the slot and, page by page, through the arena, yet counted once.
    assert num_bytes * 0.9 <= pool_pss_bytes() - before <= num_bytes * 1.2
    memory.release(seq)
    assert memory.stat("memfd_allocated_bytes") == num_bytes
    memory.core.trim(pages // 2, drop_idle=True)
    assert memory.stat("memfd_allocated_bytes") == num_bytes // 2
    memory.core.trim(0, drop_idle=True)
    assert memory.stat("memfd_allocated_bytes") == 0
    assert pool_pss_bytes() - before <= num_bytes * 0.1


def test_the_shadow_shows_slots_and_zeros() -> None:
    memory = make_memory(deferred_reclamation=False)
    a, b = memory.open(), memory.open()
    epoch = memory.begin(grow(a, 6), grow(b, 0))
    memory.slot_bytes(a)[: 2 * PAGE] = 5
    memory.core.complete(epoch)
    shadow = memory.core.shadow_buffer(0)
    assert not shadow.flags.writeable
    assert (shadow[0, : 2 * PAGE] == 5).all()
    assert not shadow[0, 2 * PAGE :].any()
    assert not shadow[1].any()
    epoch = memory.begin(grow(b, 4))  # kept in step from here on
    memory.slot_bytes(b)[:PAGE] = 9
    memory.core.complete(epoch)
    forked = memory.open()
    memory.do(fork(forked, a, 5))
    memory.core.check()
    assert (shadow[1, :PAGE] == 9).all()
    assert (shadow[2, : PAGE + TOKEN_BYTES] == 5).all()
    memory.release(a)
    assert not shadow[0].any()
    memory.release(forked, b)
    assert not shadow.any()
    memory.core.check()


def test_buffers_keep_the_memory_alive() -> None:
    gc.collect()
    files = Path("/proc/self/fd")
    before = len([*files.iterdir()])
    memory = make_memory()
    seq = memory.open()
    memory.begin(grow(seq, 4))
    tokens = memory.slot_bytes(seq)[:PAGE]
    tokens[:] = 4
    assert not memory.core.closed
    memory.core.close()
    memory.core.close()
    assert bool(memory.core.closed)
    with pytest.raises(ValueError, match="this KV memory is closed"):
        memory.core.stats()
    assert (tokens == 4).all()
    start, size = tokens.ctypes.data, tokens.nbytes
    assert len([*files.iterdir()]) == before + 1
    del memory
    assert (tokens == 4).all()
    del tokens
    gc.collect()
    assert len([*files.iterdir()]) == before
    assert not areas(start, size)


SETUP = """
from tests.memory.support import *
memory = make_memory()
core = memory.core
a, b = memory.open(range(8)), memory.open()
memory.do(grow(a, 9), grow(b, 0))
slot = lambda group, slot: core.slots_buffer(group)[slot]
arena = lambda page: core.arena_buffer(0)[page]
print("ready", flush=True)
"""


FORBIDDEN = {
    "beyond the pages": "slot(0, 0)[3 * PAGE]",
    "empty slot": "slot(0, 1)[0]",
    "page that does not exist": "arena(3)[0]",
    "evicted slot": "memory.release(a); core.trim(0, drop_idle=True); slot(0, 0)[0]",
    "trimmed page": "memory.release(a); core.trim(0, drop_idle=True); arena(0)[0]",
    "sealed page": "slot(0, 0)[PAGE - 1] = 2",
    "shared page in a fork": "c = memory.open(); memory.do(fork(c, a, 9)); "
    "slot(1, core.slot(c))[PAGE] = 2",
    "write to the shadow": "import ctypes; ctypes.memset(core.shadow_buffer(0).ctypes.data, 1, 1)",
}


@pytest.mark.parametrize("touch", FORBIDDEN.values(), ids=FORBIDDEN)
@pytest.mark.slow
def test_forbidden_access_traps(touch: str) -> None:
    result = run_python(SETUP + touch)
    assert (result.stdout, result.stderr) == ("ready\n", "")
    assert result.returncode == -signal.SIGSEGV


def test_a_warm_slot_becomes_writable_by_one_call_a_group() -> None:
    """Its eight read-only pages are adjacent."""
    memory = make_memory(zero_policy=ZeroPolicy.TENANT, prefix_caching=False)
    memory.release(memory.start(range(1, 33)))
    seq = memory.open()
    before = memory.stat("access_calls_total")
    memory.do(grow(seq, 32))
    assert memory.stat("adopted_pages_total") == 8
    # Both groups' pages become writable, and are sealed again as the step completes.
    assert memory.stat("access_calls_total") == before + 2 * GROUPS
    memory.core.check()


def test_a_fork_leaves_the_access_of_its_parents_pages_alone_where_a_step_may_read_them() -> None:
    memory = make_memory(access_under_readers=False)
    parent, child = memory.start(range(1, 9)), memory.open()
    memory.do(fork(child, parent, 8))
    assert memory.stat("access_calls_total") == 0
    memory.write(parent, 0, [1])  # and no trap
    memory.core.check()
