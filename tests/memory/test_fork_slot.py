"""Forks: whole pages are shared and read-only, the last partial page is copied."""

from __future__ import annotations

import pytest

from tests.memory.support import GROUPS, TOKEN_BYTES, Memory, make_memory
from vmserve import _core
from vmserve.errors import OutOfMemoryError


def filled(memory: Memory, num_tokens: int, tenant: int = 0) -> int:
    """A slot whose token i holds the byte 10 + i in group 0 and 110 + i in group 1."""
    slot = memory.alloc(tenant)
    memory.grow((slot, num_tokens))
    for group in range(GROUPS):
        tokens = memory.tokens(slot, group, 0, num_tokens)
        for position in range(num_tokens):
            tokens[position] = 10 + position + 100 * group
    return slot


def content(memory: Memory, slot: int, group: int, num_tokens: int) -> list[int]:
    tokens = memory.tokens(slot, group, 0, num_tokens)
    assert (tokens == tokens[:, :1]).all()
    return [int(value) for value in tokens[:, 0]]


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 8, 10])
def test_a_fork_has_the_content_and_shares_whole_pages(num_tokens: int) -> None:
    memory = make_memory()
    source = filled(memory, 10)
    fork = memory.fork(source, num_tokens)
    whole, partial = divmod(num_tokens, 4)
    fresh = [3] if partial else []
    assert memory.table(source) == [0, 1, 2]
    assert memory.table(fork) == [0, 1, 2][:whole] + fresh
    assert memory.core.slot_length(fork) == num_tokens
    assert memory.stat("shared_pages") == whole
    assert memory.stat("used_pages") == 3 + len(fresh)
    for group in range(GROUPS):
        expected = [10 + i + 100 * group for i in range(10)]
        assert content(memory, fork, group, num_tokens) == expected[:num_tokens]
        assert content(memory, source, group, 10) == expected
    memory.core.check()


def test_fork_and_source_grow_apart() -> None:
    memory = make_memory()
    source = filled(memory, 6)
    fork = memory.fork(source, 6)
    memory.grow((source, 9), (fork, 9))
    for slot, value in ((source, 1), (fork, 2)):
        memory.tokens(slot, 0, 6, 9)[:] = value
    assert content(memory, source, 0, 9) == [10, 11, 12, 13, 14, 15, 1, 1, 1]
    assert content(memory, fork, 0, 9) == [10, 11, 12, 13, 14, 15, 2, 2, 2]
    memory.core.check()


def test_a_page_is_free_when_its_last_slot_lets_go() -> None:
    memory = make_memory()
    source = filled(memory, 8)
    forks = [memory.fork(source, 8), memory.fork(source, 4)]
    assert (memory.stat("shared_pages"), memory.stat("used_pages")) == (2, 2)
    memory.release(source)
    assert (memory.stat("shared_pages"), memory.stat("used_pages")) == (1, 2)
    memory.release(forks[0])
    assert (memory.stat("shared_pages"), memory.stat("used_pages")) == (0, 1)
    assert content(memory, forks[1], 1, 4) == [110, 111, 112, 113]
    memory.core.check()
    memory.release(forks[1])
    assert memory.stat("free_pages") == 2
    writable = memory.alloc()
    memory.grow((writable, 8))
    assert memory.table(writable) == [0, 1]
    memory.tokens(writable, 0, 0, 8)[:] = 1  # no longer read-only
    memory.core.check()


def test_a_fork_of_a_fork_shares_and_copies_the_same_way() -> None:
    memory = make_memory()
    first = filled(memory, 7)
    second = memory.fork(first, 6)
    third = memory.fork(second, 5)
    assert [memory.table(slot) for slot in (first, second, third)] == [[0, 1], [0, 2], [0, 3]]
    assert content(memory, third, 1, 5) == [110, 111, 112, 113, 114]
    memory.core.check()


def test_the_copy_shows_nothing_of_the_page_before() -> None:
    memory = make_memory(zero_policy=_core.ZeroPolicy.TENANT)
    other = filled(memory, 4, tenant=1)
    source = filled(memory, 6, tenant=2)
    memory.release(other)
    fork = memory.fork(source, 6)
    assert memory.table(fork) == [1, 0]
    assert not memory.tokens(fork, 0, 6, 8).any()
    assert memory.stat("pages_zeroed_total") == 1


def test_a_fork_keeps_its_read_slack_mapped() -> None:
    memory = make_memory(read_slack=4)
    source = filled(memory, 8)
    fork = memory.fork(source, 8)
    assert (memory.table(source), memory.table(fork)) == ([0, 1, 2], [0, 1, 3])
    assert not memory.tokens(fork, 0, 8, 12).any()


def test_no_slot_left_is_none() -> None:
    memory = make_memory(num_slots=1)
    source = filled(memory, 4)
    assert memory.core.fork_slot(source, 4) is None
    memory.core.check()


def test_no_page_left_is_an_error_and_changes_nothing() -> None:
    memory = make_memory(limit_pages=2)
    source = filled(memory, 6)
    before = memory.state(totals=True)
    with pytest.raises(OutOfMemoryError, match="needs 1 pages, 0 can be taken"):
        memory.core.fork_slot(source, 6)
    assert memory.state(totals=True) == before
    memory.tokens(source, 0, 0, 6)[:] = 1  # still writable
    assert memory.fork(source, 4) == 1  # whole pages need none
    memory.core.check()


@pytest.mark.parametrize("num_tokens", [-1, 7])
def test_forking_beyond_the_length_is_misuse(num_tokens: int) -> None:
    memory = make_memory()
    source = filled(memory, 6)
    with pytest.raises(ValueError, match=f"cannot fork slot 0 at {num_tokens} tokens: it holds 6"):
        memory.core.fork_slot(source, num_tokens)
    assert TOKEN_BYTES == 1024
