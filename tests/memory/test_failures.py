"""Every driver call of every operation fails, in turn: nothing changes, or it is quarantined."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from tests.memory.support import GROUPS, Memory, make_memory
from vmserve import _core
from vmserve.errors import DriverError, OutOfMemoryError

Operation = Callable[[Memory], None]


def prepared(*, shadow: bool) -> Memory:
    """Slots 0 and 1 in use, two dirty free pages, little room: every path of a growth is taken."""
    memory = make_memory(grow_pages=2, limit_pages=12)
    if shadow:
        memory.core.shadow_buffer(0)
    a, b, c = (memory.alloc(tenant) for tenant in (1, 2, 3))
    memory.grow((a, 6), (c, 8), (b, 6))
    for slot, value in ((a, 11), (b, 22), (c, 33)):
        for group in range(GROUPS):
            memory.tokens(slot, group, 0, 6)[:] = value
    memory.release(c)
    assert (memory.table(a), memory.table(b)) == ([0, 1], [4, 5])
    assert memory.stat("free_pages") == 2
    return memory


def grow(memory: Memory) -> None:
    memory.grow((0, 12), (1, 18))


def fork(memory: Memory) -> None:
    memory.fork(0, 6)


def trim(memory: Memory) -> None:
    memory.core.trim(0)


def lower_limit(memory: Memory) -> None:
    memory.core.set_limit(5)


def show_shadow(memory: Memory) -> None:
    memory.core.shadow_buffer(1)


def content(memory: Memory) -> list[bytes]:
    return [
        memory.tokens(slot, group, 0, 6).tobytes() for slot in (0, 1) for group in range(GROUPS)
    ]


def num_driver_calls(operation: Operation, *, shadow: bool) -> int:
    memory = prepared(shadow=shadow)
    memory.faults.arm(1 << 40)
    operation(memory)
    return memory.faults.num_calls


@pytest.mark.parametrize(
    ("operation", "shadow", "least_calls"),
    [
        (grow, False, 10),
        (grow, True, 14),
        (fork, False, 8),
        (fork, True, 10),
        (trim, False, 4),
        (lower_limit, False, 2),
        (show_shadow, False, 2),
    ],
)
@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EINVAL])
def test_a_failed_call_leaves_the_state_as_it_was(
    operation: Operation, shadow: bool, least_calls: int, code: int
) -> None:
    num_calls = num_driver_calls(operation, shadow=shadow)
    assert num_calls >= least_calls
    for call in range(1, num_calls + 1):
        memory = prepared(shadow=shadow)
        before, bytes_before = memory.state(totals=True), content(memory)
        memory.faults.arm(call, code=code)
        with pytest.raises((DriverError, OutOfMemoryError), match="injected fault"):
            operation(memory)
        memory.core.check()
        after = memory.state(totals=True)
        if operation is lower_limit:
            before["limit_pages"] = 5  # the limit itself holds; the next trim gives back
        assert after == before, f"call {call} of {num_calls}"
        assert content(memory) == bytes_before
        operation(memory)  # and nothing stands in the way of a second attempt
        memory.core.check()
        assert memory.stat("pending_repairs") == 0


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("operation", [grow, fork, trim])
def test_what_cannot_be_undone_is_quarantined_until_it_can(
    operation: Operation, shadow: bool
) -> None:
    """The k-th call fails and so does every later one, the undoing included."""
    num_calls = num_driver_calls(operation, shadow=shadow)
    quarantined = []
    for call in range(1, num_calls + 1):
        memory = prepared(shadow=shadow)
        before, bytes_before = memory.state(), content(memory)
        memory.faults.arm(call, forever=True)
        with pytest.raises((DriverError, OutOfMemoryError), match="injected fault"):
            operation(memory)
        memory.core.check()
        assert content(memory) == bytes_before
        state = memory.state()
        assert (state["tables"], state["lengths"]) == (before["tables"], before["lengths"])
        quarantined.append(state["quarantined_pages"])
        if state["pending_repairs"]:
            assert "injected fault" in memory.core.last_error()
            with pytest.raises((DriverError, OutOfMemoryError)):
                grow(memory)  # still refused, still whole
            memory.core.check()
        memory.faults.disarm()
        operation(memory)
        memory.core.check()
        assert (memory.stat("pending_repairs"), memory.stat("quarantined_pages")) == (0, 0)
        for slot in list(memory.slots):
            memory.release(slot)
        memory.core.trim(0)
        memory.core.check()
        assert memory.stat("memfd_allocated_bytes") == 0
    assert max(quarantined) > 0


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("forever", [False, True])
def test_a_release_never_fails_and_loses_nothing(forever: bool, shadow: bool) -> None:
    memory = prepared(shadow=shadow)
    memory.faults.arm(1 << 40)
    memory.release(0)
    num_calls = memory.faults.num_calls
    assert num_calls == GROUPS * (2 if shadow else 1)
    for call in range(1, num_calls + 1):
        memory = prepared(shadow=shadow)
        forked = memory.fork(0, 6)
        memory.faults.arm(call, forever=forever)
        memory.release(0)
        memory.core.check()
        # Page 0 lives on in the fork; page 1 is held back with slot 0.
        assert memory.stat("quarantined_pages") == 1
        assert memory.stat("pending_repairs") == 1
        assert memory.core.alloc_slot() == (3 if forever else 0)  # trying again may mend it
        memory.faults.disarm()
        memory.grow((forked, 7))
        memory.core.check()
        assert memory.stat("quarantined_pages") == 0
        assert memory.stat("free_pages") == 2
        assert memory.core.alloc_slot() == (0 if forever else 3)


def test_a_slot_with_a_stuck_mapping_does_not_grow_but_can_be_released() -> None:
    memory = prepared(shadow=False)
    num_calls = num_driver_calls(grow, shadow=False)
    memory.faults.arm(num_calls, forever=True)  # the last map, and then the undoing
    with pytest.raises(DriverError):
        grow(memory)
    assert memory.stat("pending_repairs") == 1
    with pytest.raises(DriverError, match="slot 0 has mappings that could not be undone: injected"):
        memory.grow((0, 7))
    assert memory.core.alloc_slot() == 2  # others go on
    memory.core.release(2)
    memory.faults.disarm()
    memory.release(0)
    memory.core.check()
    assert memory.stat("pending_repairs") == 0


def test_releasing_a_slot_ends_the_repair_of_its_access() -> None:
    """Pages that a failed fork left read-only need no repair once their slot is unmapped."""
    num_calls = num_driver_calls(fork, shadow=False)
    for call in range(1, num_calls + 1):
        memory = prepared(shadow=False)
        memory.faults.arm(call, forever=True)
        with pytest.raises((DriverError, OutOfMemoryError)):
            fork(memory)
        memory.release(0)
        memory.core.check()
        memory.faults.disarm()
        memory.release(1)
        memory.core.check()
        assert memory.stat("pending_repairs") == 0
        assert memory.core.trim(0) > 0
        assert memory.stat("memfd_allocated_bytes") == 0


def test_a_chunk_that_is_not_there_falls_back_to_what_is_needed() -> None:
    memory = make_memory(grow_pages=8, limit_pages=12)
    slot = memory.alloc()
    memory.faults.arm(1, code=errno.ENOMEM)  # the chunk of 8 pages
    memory.grow((slot, 5))
    assert memory.faults.num_calls > 2
    assert (memory.stat("committed_pages"), memory.table(slot)) == (2, [0, 1])
    memory.core.check()


def test_check_notices_a_mapping_that_is_not_recorded() -> None:
    memory = prepared(shadow=False)
    address = memory.core.slots_buffer(0)[3].ctypes.data
    memory.faults.map([(address, 0, 1, _core.Access.READ)])
    with pytest.raises(AssertionError, match="21 frames are mapped, 20 are recorded"):
        memory.core.check()
    memory.faults.unmap([(address, 4096)])
    memory.core.check()
    memory.faults.set_access(
        [(memory.core.slots_buffer(1)[0].ctypes.data, 4096, _core.Access.READ)]
    )
    with pytest.raises(AssertionError, match="page 0 of group 1 is not mapped as recorded in its"):
        memory.core.check()
