"""Slots, arena and pool: exact page ids, aliasing, limits, and the ledger after each call."""

from __future__ import annotations

import gc
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.memory.support import (
    GROUPS,
    PAGE,
    PAGE_TOKENS,
    TOKEN_BYTES,
    kernel_mappings,
    make_memory,
    pss_bytes,
    run_python,
)
from vmserve import _core
from vmserve.errors import DriverError, OutOfMemoryError
from vmserve.memory.base import MemoryStats


def test_slots_are_handed_out_lowest_first() -> None:
    memory = make_memory(num_slots=3)
    assert [memory.core.alloc_slot() for _ in range(4)] == [0, 1, 2, None]
    memory.core.release(1)
    memory.core.release(0)
    assert [memory.core.alloc_slot() for _ in range(3)] == [0, 1, None]


def test_pages_are_adjacent_where_they_can_be_and_lowest_otherwise() -> None:
    memory = make_memory()
    a, b = memory.alloc(), memory.alloc()
    memory.grow((a, 5), (b, 4))
    assert (memory.table(a), memory.table(b)) == ([0, 1], [2])
    memory.grow((a, 9))
    memory.grow((b, 8))
    assert (memory.table(a), memory.table(b)) == ([0, 1, 3], [2, 4])
    memory.release(a)
    memory.grow((b, 16))  # 5 does not exist; then 0 is the lowest, and 1 and 3 follow
    assert memory.table(b) == [2, 4, 0, 1]
    c = memory.alloc()
    memory.grow((c, 8))
    assert memory.table(c) == [3, 5]
    memory.core.check()


def test_growing_commits_in_chunks_up_to_the_limit() -> None:
    memory = make_memory(grow_pages=4, limit_pages=6)
    slot = memory.alloc()
    committed = []
    for num_tokens in (1, 16, 17, 24):
        memory.grow((slot, num_tokens))
        committed.append((memory.stat("committed_pages"), memory.stat("free_pages")))
    assert committed == [(4, 3), (4, 0), (6, 1), (6, 0)]
    assert memory.stat("memfd_allocated_bytes") == 6 * GROUPS * PAGE


def test_a_slot_and_the_arena_show_the_same_bytes() -> None:
    memory = make_memory()
    other, slot = memory.alloc(), memory.alloc()
    memory.grow((other, 4))
    memory.grow((slot, 12))
    assert memory.table(slot) == [1, 2, 3]
    for group in range(GROUPS):
        tokens = memory.tokens(slot, group, 0, 12)
        for position in range(12):
            tokens[position] = 100 * group + position
        for index, page in enumerate(memory.table(slot)):
            in_arena = memory.page(page, group).reshape(PAGE_TOKENS, TOKEN_BYTES)
            expected = 100 * group + index * PAGE_TOKENS + np.arange(PAGE_TOKENS)
            assert (in_arena == expected[:, None]).all()
        memory.page(2, group)[:] = 77  # and the other way round
        assert (memory.tokens(slot, group, 4, 8) == 77).all()
        assert (memory.tokens(other, group, 0, 4) == 0).all()


def test_growth_never_shrinks_and_merges_repeated_slots() -> None:
    memory = make_memory()
    slot = memory.alloc()
    assert memory.core.plan([(slot, 5), (slot, 13), (slot, 2)])[0] == 4
    memory.grow((slot, 5), (slot, 13), (slot, 2))
    memory.grow((slot, 1))
    assert (memory.core.slot_length(slot), len(memory.table(slot))) == (13, 4)
    memory.grow()
    memory.grow((slot, 0))
    memory.core.check()


def test_plan_is_read_only_and_counts_what_is_missing() -> None:
    memory = make_memory(limit_pages=3)
    a, b = memory.alloc(), memory.alloc()
    before = memory.state(totals=True)
    needed, available, _ = memory.core.plan([(a, 8), (b, 9)])
    assert (needed, available) == (5, 3)
    assert memory.state(totals=True) == before
    memory.grow((a, 8))
    assert memory.core.plan([(a, 8), (b, 9)])[:2] == (3, 1)


def test_a_stale_plan_is_refused() -> None:
    memory = make_memory()
    a, b = memory.alloc(), memory.alloc()
    _, _, version = memory.core.plan([(a, 8)])
    memory.grow((b, 4))
    with pytest.raises(ValueError, match="the plan is stale"):
        memory.core.apply([(a, 8)], version)
    assert memory.table(a) == []


@pytest.mark.parametrize(
    ("growth", "message"),
    [
        ((1, 4), "slot 1 is not allocated"),
        ((4, 4), "slot 4 is outside 0 .. 3"),
        ((-1, 4), "slot -1 is outside 0 .. 3"),
        ((0, 33), "slot 0 cannot hold 33 tokens: max_len is 32"),
        ((0, -1), "slot 0 cannot hold -1 tokens"),
    ],
)
def test_misuse_names_the_number(growth: tuple[int, int], message: str) -> None:
    memory = make_memory()
    memory.alloc()
    with pytest.raises(ValueError, match=message):
        memory.core.plan([growth])


def test_wrong_configurations_are_refused() -> None:
    with pytest.raises(ValueError, match="limit_pages is 40: it must lie between 1 and 32"):
        make_memory(limit_pages=40)
    with pytest.raises(ValueError, match="must be positive"):
        make_memory(num_slots=0)
    driver = _core.HostDriver(PAGE, 8)
    sizes: dict[str, Any] = {"num_slots": 1, "max_len": 8, "limit_pages": 4}
    with pytest.raises(ValueError, match="2 groups of 5 pages need more"):
        _core.KVMemory(driver, num_groups=2, page_tokens=4, token_bytes=1024, max_pages=5, **sizes)
    with pytest.raises(ValueError, match="a page of 4 tokens of 512 bytes is not the driver's"):
        _core.KVMemory(driver, num_groups=1, page_tokens=4, token_bytes=512, max_pages=4, **sizes)


def test_applying_more_than_the_limit_says_how_much_is_missing() -> None:
    memory = make_memory(limit_pages=2)
    slot = memory.alloc()
    _, _, version = memory.core.plan([(slot, 12)])
    with pytest.raises(OutOfMemoryError) as caught:
        memory.core.apply([(slot, 12)], version)
    assert str(caught.value) == (
        "needs 3 pages, 2 can be taken: raise the limit of the KV cache from 16.0 KiB to 24.0 KiB "
        "(--kv-cache-memory) or release slots"
    )


def test_statistics_after_each_step() -> None:
    memory = make_memory(limit_pages=8, grow_pages=2)
    slot = memory.alloc()
    memory.grow((slot, 5))
    stats = memory.core.stats()
    expected = {
        "page_bytes": GROUPS * PAGE,
        "page_tokens": 4,
        "limit_pages": 8,
        "committed_pages": 2,
        "free_pages": 0,
        "used_pages": 2,
        "shared_pages": 0,
        "quarantined_pages": 0,
        "num_slots": 4,
        "used_slots": 1,
        "used_tokens": 5,
        "tail_waste_bytes": 3 * TOKEN_BYTES * GROUPS,
        "pages_mapped_total": 2,
        "pages_unmapped_total": 0,
        "pages_committed_total": 2,
        "pages_given_back_total": 0,
        "pages_zeroed_total": 0,
        "map_calls_total": GROUPS,
        "unmap_calls_total": 0,
        "arena_map_calls_total": GROUPS,
        "memfd_allocated_bytes": 2 * GROUPS * PAGE,
        "num_mappings": 4 * GROUPS,
    }
    assert {name: getattr(stats, name) for name in expected} == expected
    assert set(expected) | {"map_seconds_total"} == set(MemoryStats.__dataclass_fields__)
    assert stats.map_seconds_total > 0
    memory.release(slot)
    assert memory.core.trim(0) == 2
    stats = memory.core.stats()
    changed = {
        "committed_pages": 0,
        "used_pages": 0,
        "used_slots": 0,
        "used_tokens": 0,
        "tail_waste_bytes": 0,
        "pages_unmapped_total": 2,
        "pages_given_back_total": 2,
        "unmap_calls_total": GROUPS,
        "memfd_allocated_bytes": 0,
        "num_mappings": 2 * GROUPS,
    }
    expected |= changed
    assert {name: getattr(stats, name) for name in expected} == expected


def test_trim_gives_back_the_highest_free_pages() -> None:
    memory = make_memory()
    a, b, c = (memory.alloc() for _ in range(3))
    memory.grow((a, 8), (b, 8), (c, 8))
    memory.release(a)
    memory.release(c)
    assert memory.core.trim(keep_pages=3) == 1
    assert memory.stat("memfd_allocated_bytes") == 5 * GROUPS * PAGE
    assert memory.core.trim(keep_pages=1) == 2
    memory.core.check()
    a = memory.alloc()
    memory.grow((a, 12))  # page 0 was kept, 1 and 4 come into being again
    assert memory.table(a) == [0, 1, 4]
    memory.grow((b, 12))
    assert memory.table(b) == [2, 3, 5]
    assert (memory.tokens(a, 0, 0, 12) == 0).all()
    memory.core.check()


def test_the_limit_can_change_while_slots_are_in_use() -> None:
    memory = make_memory(limit_pages=8)
    a, b = memory.alloc(), memory.alloc()
    memory.grow((a, 16), (b, 8))
    memory.release(b)
    memory.core.set_limit(3)
    # What is free goes at once; what a holds stays until it is released.
    assert (memory.stat("committed_pages"), memory.stat("limit_pages")) == (4, 3)
    assert memory.core.plan([(a, 17)])[:2] == (1, 0)
    memory.release(a)
    assert (memory.stat("committed_pages"), memory.stat("free_pages")) == (3, 3)
    memory.core.set_limit(32)
    c = memory.alloc()
    memory.grow((c, 32))
    assert memory.table(c) == list(range(8))
    memory.core.check()
    with pytest.raises(ValueError, match="the limit of 33 pages must lie between 1 and 32"):
        memory.core.set_limit(33)


def test_read_slack_keeps_pages_mapped_beyond_the_length() -> None:
    memory = make_memory(read_slack=5, max_len=8)
    slot = memory.alloc()
    memory.grow((slot, 3))  # 3 + 5 tokens
    assert memory.table(slot) == [0, 1]
    memory.grow((slot, 8))
    assert memory.table(slot) == [0, 1, 2, 3]
    assert (memory.tokens(slot, 1, 0, 13) == 0).all()
    assert memory.core.plan([(memory.alloc(), 0)])[0] == 0


POLICIES = _core.ZeroPolicy


@pytest.mark.parametrize(
    ("policy", "second_tenant", "expected", "zeroed"),
    [
        (POLICIES.ALWAYS, 7, 0, 1),
        (POLICIES.ALWAYS, 8, 0, 1),
        (POLICIES.TENANT, 7, 66, 0),
        (POLICIES.TENANT, 8, 0, 1),
        (POLICIES.NEVER, 8, 66, 0),
    ],
)
def test_zero_policy(
    policy: _core.ZeroPolicy, second_tenant: int, expected: int, zeroed: int
) -> None:
    memory = make_memory(zero_policy=policy)
    first = memory.alloc(tenant=7)
    memory.grow((first, 4))
    for group in range(GROUPS):
        memory.tokens(first, group, 0, 4)[:] = 66
    memory.release(first)
    second = memory.alloc(tenant=second_tenant)
    memory.grow((second, 8))
    assert memory.table(second) == [0, 1]
    for group in range(GROUPS):
        assert (memory.tokens(second, group, 0, 4) == expected).all()
        assert (memory.tokens(second, group, 4, 8) == 0).all()  # never used before
    assert memory.stat("pages_zeroed_total") == zeroed


def test_a_page_that_came_back_from_the_system_is_not_zeroed_again() -> None:
    memory = make_memory()
    slot = memory.alloc()
    memory.grow((slot, 8))
    memory.tokens(slot, 0, 0, 8)[:] = 1
    memory.release(slot)
    memory.core.trim(0)
    memory.grow((memory.alloc(), 8))
    assert (memory.tokens(0, 0, 0, 8) == 0).all()
    assert memory.stat("pages_zeroed_total") == 0


def test_memory_follows_mapping_and_trim() -> None:
    pages = 4096
    memory = make_memory(num_slots=1, max_len=4 * pages, limit_pages=pages, max_pages=pages)
    num_bytes = pages * GROUPS * PAGE  # 32 MiB
    slot = memory.alloc()
    before = pss_bytes()
    memory.grow((slot, 4 * pages))
    for group in range(GROUPS):
        memory.tokens(slot, group, 0, 4 * pages)[:] = 1
        assert memory.page(pages - 1, group).all()
    assert memory.stat("memfd_allocated_bytes") == num_bytes
    # Seen through the slot and, page by page, through the arena, yet counted once.
    assert num_bytes * 0.9 <= pss_bytes() - before <= num_bytes * 1.2
    memory.release(slot)
    assert memory.stat("memfd_allocated_bytes") == num_bytes
    memory.core.trim(pages // 2)
    assert memory.stat("memfd_allocated_bytes") == num_bytes // 2
    memory.core.trim(0)
    assert memory.stat("memfd_allocated_bytes") == 0
    assert pss_bytes() - before <= num_bytes * 0.1


def test_num_mappings_is_what_the_kernel_counts() -> None:
    memory = make_memory()
    a, b = memory.alloc(), memory.alloc()
    for _ in range(3):
        for slot in (a, b):
            memory.grow((slot, memory.core.slot_length(slot) + 4))
    memory.fork(a, 9)
    counted = 0
    for group in range(GROUPS):
        for buffer in (memory.core.slots_buffer(group), memory.core.arena_buffer(group)):
            counted += kernel_mappings(buffer.ctypes.data, buffer.nbytes)
    assert memory.stat("num_mappings") == counted


def test_a_full_map_count_is_an_error_and_changes_nothing() -> None:
    # Two slots that grow in turns: no two pages adjoin, so every page is a mapping.
    memory = make_memory(max_map_count=22)
    a, b = memory.alloc(), memory.alloc()
    memory.grow((a, 4), (b, 4))
    memory.grow((a, 8), (b, 8))
    before = memory.state(totals=True)
    with pytest.raises(DriverError, match=r"may hold 17 \(80 % of vm\.max_map_count\)"):
        memory.grow((a, 12), (b, 12))
    assert memory.state(totals=True) == before
    memory.core.check()
    memory.release(a)
    memory.release(b)
    memory.core.check()


def test_the_slot_count_and_length_can_reserve_a_tebibyte() -> None:
    memory = make_memory(num_slots=1 << 12, max_len=1 << 18)
    assert memory.core.slots_buffer(1).nbytes == 1 << 40
    for _ in range(5):
        slot = memory.alloc()
    memory.grow((slot, 4))
    memory.tokens(slot, 1, 0, 4)[:] = 3
    assert (memory.page(0, 1) == 3).all()
    memory.core.check()


def test_the_shadow_shows_slots_and_zeros() -> None:
    memory = make_memory()
    a, b = memory.alloc(), memory.alloc()
    memory.grow((a, 6))
    memory.tokens(a, 0, 0, 8)[:] = 5
    mappings = memory.stat("num_mappings")
    shadow = memory.core.shadow_buffer(0)
    assert not shadow.flags.writeable
    assert (shadow[a, : 2 * PAGE] == 5).all()
    assert not shadow[a, 2 * PAGE :].any()
    assert not shadow[b].any()
    memory.grow((b, 4))  # kept in step from here on
    memory.tokens(b, 0, 0, 4)[:] = 9
    forked = memory.fork(a, 5)
    memory.core.check()
    assert (shadow[b, :PAGE] == 9).all()
    assert (shadow[forked, : PAGE + TOKEN_BYTES] == 5).all()
    memory.release(a)
    assert not shadow[a].any()
    memory.release(forked)
    memory.release(b)
    assert not shadow.any()
    memory.core.check()
    assert memory.stat("num_mappings") < mappings + 2 * GROUPS


def num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_buffers_keep_the_memory_alive() -> None:
    gc.collect()
    before = num_open_files()
    memory = make_memory()
    slot = memory.alloc()
    memory.grow((slot, 4))
    tokens = memory.tokens(slot, 0, 0, 4)
    tokens[:] = 4
    closed = [memory.core.closed]
    memory.core.close()
    memory.core.close()
    closed.append(memory.core.closed)
    assert closed == [False, True]
    with pytest.raises(ValueError, match="this KV memory is closed"):
        memory.core.stats()
    assert (tokens == 4).all()
    start, size = tokens.ctypes.data, tokens.nbytes
    assert num_open_files() == before + 1
    del memory
    assert (tokens == 4).all()
    del tokens
    gc.collect()
    assert num_open_files() == before
    assert kernel_mappings(start, size) == 0


def test_groups_are_checked() -> None:
    core = make_memory().core
    for buffer in (core.slots_buffer, core.arena_buffer, core.shadow_buffer):
        with pytest.raises(ValueError, match=r"group 2 is outside 0 \.\. 1"):
            buffer(2)


SETUP = """
from tests.memory.support import make_memory
memory = make_memory()
a, b = memory.alloc(), memory.alloc()
memory.grow((a, 8))
memory.tokens(a, 0, 0, 8)[:] = 1
print("ready", flush=True)
"""


@pytest.mark.parametrize(
    "touch",
    [
        "memory.tokens(a, 0, 8, 9).sum()",
        "memory.tokens(b, 0, 0, 1).sum()",
        "memory.page(2, 0).sum()",
        "held = memory.tokens(a, 0, 0, 8); memory.release(a); held.sum()",
        "held = memory.page(0, 0); memory.release(a); memory.core.trim(0); held.sum()",
        "memory.fork(a, 5); memory.tokens(a, 0, 0, 1)[:] = 2",
        "c = memory.fork(a, 5); memory.tokens(c, 1, 3, 4)[:] = 2",
        "view = memory.core.shadow_buffer(0).ctypes.data; import ctypes; ctypes.memset(view, 1, 1)",
    ],
    ids=[
        "beyond the pages",
        "empty slot",
        "page that does not exist",
        "released slot",
        "trimmed page",
        "shared page in the source",
        "shared page in the fork",
        "write to the shadow",
    ],
)
def test_forbidden_access_traps(touch: str) -> None:
    result = run_python(SETUP + touch)
    assert (result.stdout, result.stderr) == ("ready\n", "")
    assert result.returncode == -signal.SIGSEGV


def test_calls_in_a_fork_of_the_process_are_refused() -> None:
    result = run_python(
        SETUP
        + """
import os
child = os.fork()
if child == 0:
    for call in (memory.core.stats, lambda: memory.core.alloc_slot(0),
                 lambda: memory.core.release(a), lambda: memory.core.trim(0)):
        try:
            call()
        except ValueError as error:
            assert "was used in its fork" in str(error), error
        else:
            os._exit(1)
    memory.core.close()
    os._exit(0)
_, status = os.waitpid(child, 0)
memory.core.check()
assert (memory.tokens(a, 0, 0, 8) == 1).all()
print("child", os.waitstatus_to_exitcode(status))
"""
    )
    assert (result.stdout, result.returncode) == ("ready\nchild 0\n", 0), result.stderr
