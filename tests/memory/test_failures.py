"""Every driver call of every operation fails, in turn, with each class of error, once and for ever.

What is promised: either the sequences are as before (the prefix cache may have shrunk), and the
operation works once the driver does; or the pool says that it has failed. Nothing leaks, and
nothing hangs.

Each run of the suite fails every call once, with errors that take turns. All combinations (more
than ten thousand cases, some three minutes):

pytest tests/memory/test_failures.py --hypothesis-profile=thorough --timeout=0
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

from tests.memory.support import (
    GROUPS,
    Memory,
    Op,
    attach,
    convert,
    fork,
    grow,
    make_memory,
    swap_in,
    swap_out,
)
from vmserve import _core
from vmserve._core import Health, MapperMode, View, ZeroPolicy
from vmserve.errors import DriverError, OutOfMemoryError

PROMPT = list(range(1, 19))  # 18 tokens: four full blocks and a half one


FAULTS: list[dict[str, Any]] = [
    {"code": errno.ENOMEM},
    {"code": errno.EINVAL},
    {"code": errno.EAGAIN},
    {"code": errno.EIO, "sticky": True},
]
#: Sequences of the prepared memory.
V, P, TWIN, AWAY, EMPTY_V, EMPTY_P = 0, 1, 2, 3, 5, 6


def prepared(blocks_per_page: int, mapper: MapperMode, **where: Any) -> Memory:
    """Sequences in both views, a fork, one that is swapped out, parked slots, dirty pages."""
    memory = make_memory(
        blocks_per_page=blocks_per_page, mapper=mapper, limit_pages=24, max_len=64, num_slots=6,
        zero_policy=ZeroPolicy.ALWAYS, swap_blocks=16, grow_pages=2, reclaim_share=0.5,
        lookahead_tokens=0 if mapper is MapperMode.OFF else 4, **where,
    )  # fmt: skip
    v = memory.start(PROMPT)
    p = memory.start([t + 20 for t in PROMPT], View.PAGED)
    twin, away = memory.open(view=View.PAGED), memory.open([9] * 6, View.PAGED)
    memory.do(fork(twin, p, 18), grow(away, 6))
    memory.write(away, 0, [9] * 6)
    memory.do(swap_out(away))
    gone = memory.start([t + 40 for t in PROMPT])
    empty_v = memory.open([*PROMPT, 100, 101])
    empty_p = memory.open([*PROMPT, 102], View.PAGED)
    memory.release(gone)
    assert (v, p, twin, away, gone) == (V, P, TWIN, AWAY, 4)
    assert (empty_v, empty_p) == (EMPTY_V, EMPTY_P)
    memory.core.settle_mapper()  # what fails is the operation's own
    return memory


def beyond(memory: Memory) -> list[Op]:
    """More than is free: parked slots lose their tails, cached blocks their names."""
    available = memory.core.plan([]).available_pages * memory.page_tokens
    first = min(64, available)
    return [grow(V, min(64, 20 + available - first)), grow(EMPTY_V, first)]


def matched(memory: Memory, seq: int) -> Op:
    return attach(seq, memory.core.match(seq))


def lower_limit(memory: Memory) -> None:
    memory.core.set_limit(4)
    memory.core.set_limit(24)


#: Of a step, the ops that it has.
STEPS: dict[str, Callable[[Memory], list[Op]]] = {
    "grow": lambda _: [grow(V, 40), grow(P, 40), grow(TWIN, 19)],
    "attach": lambda memory: [
        *(matched(memory, EMPTY_V), matched(memory, EMPTY_P)),
        *(grow(EMPTY_V, 20), grow(EMPTY_P, 19)),
    ],
    "fork": lambda _: [
        *(fork(EMPTY_V, V, 17), fork(EMPTY_P, V, 18)),
        *(grow(V, 19), grow(EMPTY_V, 18), grow(EMPTY_P, 19)),
    ],
    "convert": lambda _: [convert(V, View.PAGED), convert(TWIN, View.VIRTUAL)],
    "swap": lambda _: [swap_out(V), swap_in(AWAY)],
    "window": lambda _: [grow(V, 34, 17), grow(P, 34, 17)],
    "everything": lambda memory: [
        *(matched(memory, EMPTY_V), fork(EMPTY_P, P, 18), swap_in(AWAY), convert(V, View.PAGED)),
        *(grow(EMPTY_V, 20), grow(EMPTY_P, 22), grow(AWAY, 7), grow(V, 25)),
    ],
    "evict": beyond,
    # Releases never fail; with the mapper behind them the next step reclaims.
    "release": lambda _: [grow(EMPTY_V, 20)],
}
OPERATIONS: dict[str, Callable[[Memory], object]] = {
    "trim": lambda memory: memory.core.trim(0, drop_idle=True),
    "lower limit": lower_limit,
    **{name: lambda memory, ops=ops: memory.do(*ops(memory)) for name, ops in STEPS.items()},
}
#: What a refusal that cannot be undone may leave, until it can.
REPAIRED = ("quarantined_pages", "pending_repairs", "waiting_pages", "limit_pages")


def sequences(memory: Memory) -> dict[str, object]:
    state = memory.state()
    return {name: value for name, value in state.items() if name not in REPAIRED}


def end(memory: Memory) -> None:
    """Everything can be given back."""
    memory.release(*sorted(memory.seqs))
    memory.core.complete(memory.core.begun_epoch)
    memory.core.trim(0, drop_idle=True)
    memory.core.check()
    assert memory.stats("pending_repairs", "memfd_allocated_bytes", "swap_blocks") == (0, 0, 0)


def one_case(
    operation: Callable[[Memory], object], memory: Memory, call: int, fault: dict[str, Any]
) -> None:
    before, bytes_before = sequences(memory), memory.content()
    memory.faults.arm(call, **fault)
    refusal = None
    try:
        operation(memory)
    except (DriverError, OutOfMemoryError) as error:
        refusal = str(error)
    if refusal is not None:
        assert "injected fault" in refusal or "sticky" in fault or fault["forever"], refusal
        assert sequences(memory) == before
        assert memory.content() == bytes_before
    memory.core.check()
    memory.faults.disarm()
    if memory.core.stats().health is Health.FAILED:
        assert "sticky" in fault
        with pytest.raises(DriverError, match="has failed and serves no more") as caught:
            memory.core.trim(0)
        assert caught.value.sticky
        return
    if refusal is not None:
        operation(memory)  # and nothing stands in the way of a second attempt
        memory.core.check()
        assert memory.core.stats().health is Health.HEALTHY
    end(memory)


def every_case(
    operation: Callable[[Memory], object], turn: int, prepare: Callable[[], Memory]
) -> None:
    memory = prepare()
    memory.faults.arm(1 << 40)
    operation(memory)
    memory.core.settle_mapper()
    assert memory.faults.num_calls > 0
    kinds = [fault | {"forever": forever} for fault in FAULTS for forever in (False, True)]
    is_thorough = settings.get_current_profile_name() == "thorough"
    for call in range(1, memory.faults.num_calls + 1):
        # Successive calls, and the same call in other turns, get different errors.
        for fault in kinds if is_thorough else [kinds[(call + turn) % len(kinds)]]:
            one_case(operation, prepare(), call, fault)


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("mapper", [MapperMode.OFF, MapperMode.MANUAL], ids=["off", "mapper"])
@pytest.mark.parametrize("blocks_per_page", [1, 4])
@pytest.mark.parametrize("name", list(OPERATIONS))
@pytest.mark.slow
def test_a_failed_call_leaves_the_sequences_as_they_were(
    name: str, blocks_per_page: int, mapper: MapperMode, shadow: bool
) -> None:
    turn = 2 * (mapper is MapperMode.OFF) + 4 * shadow + blocks_per_page

    def prepare() -> Memory:
        memory = prepared(blocks_per_page, mapper)
        if shadow:
            memory.core.shadow_buffer(0)
        return memory

    every_case(OPERATIONS[name], turn, prepare)


@pytest.mark.parametrize(("member", "is_remote"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("name", list(OPERATIONS))
@pytest.mark.slow
def test_so_does_one_that_one_rank_of_two_refuses(name: str, member: int, is_remote: bool) -> None:
    mapper = MapperMode.MANUAL if len(name) % 2 else MapperMode.OFF
    every_case(
        OPERATIONS[name],
        member + 2 * is_remote,
        lambda: prepared(4 - 3 * member, mapper, faulty_member=member, is_remote=is_remote),
    )


def test_a_chunk_that_is_not_there_falls_back_to_what_is_needed() -> None:
    memory = make_memory(grow_pages=8, limit_pages=12)
    seq = memory.open()
    memory.faults.arm(1, code=errno.ENOMEM)  # the chunk of 8 pages
    memory.do(grow(seq, 5))
    assert memory.faults.num_calls > 2
    assert (memory.stat("committed_pages"), memory.blocks(seq)) == (2, [0, 1])
    memory.core.check()


def test_a_degraded_pool_says_so_and_heals() -> None:
    memory = make_memory()
    seq = memory.start(PROMPT[:8])
    # Create and map in the arena (two groups each), then map the slot: the second group's call
    # fails, and so does the undoing of the first's.
    memory.faults.arm(5, forever=True)
    with pytest.raises(DriverError):
        memory.do(grow(seq, 12))
    stats = memory.core.stats()
    assert (stats.health, stats.pending_repairs, stats.quarantined_pages) == (Health.DEGRADED, 1, 1)
    assert "injected fault" in memory.core.last_error()
    with pytest.raises(DriverError, match="mappings that could not be undone: injected"):
        memory.do(grow(seq, 12))
    memory.do(grow(memory.open(), 0))  # others go on
    memory.faults.disarm()
    memory.do(grow(seq, 12))
    stats = memory.core.stats()
    assert (stats.health, stats.quarantined_pages) == (Health.HEALTHY, 0)
    memory.core.check()


@pytest.mark.parametrize("call", [2, 3])
def test_swap_memory_that_is_freed_in_part_holds_nothing(call: int) -> None:
    """Each chunk is freed by a call of its own; trim() waits for the device first."""
    memory = make_memory(swap_blocks=64)
    seqs = [memory.start(PROMPT), memory.start(PROMPT)]
    for seq in seqs:
        memory.faults.arm(1, code=errno.ENOMEM)  # no more than is needed, then
        memory.do(swap_out(seq))
        memory.faults.disarm()
    for seq in seqs:
        memory.do(swap_in(seq))
    memory.faults.arm(call)
    with pytest.raises(DriverError, match=f"free_host is call {call}"):
        memory.core.trim(0, False)
    memory.faults.disarm()
    before = memory.content()
    memory.do(*map(swap_out, seqs))
    memory.do(*map(swap_in, seqs))
    assert memory.content() == before
    memory.core.trim(0, False)
    memory.core.check()


def test_check_notices_a_mapping_that_is_not_recorded() -> None:
    memory = make_memory()
    memory.start(PROMPT[:6])
    address = memory.core.slots_buffer(0)[3].ctypes.data
    memory.faults.map([(address, 0, 1, _core.Access.READ)])
    with pytest.raises(AssertionError, match="9 frames are mapped, 8 are recorded"):
        memory.core.check()
    memory.faults.unmap([(address, 4096)])
    memory.core.check()
    memory.faults.set_access(
        [(memory.core.slots_buffer(1)[0].ctypes.data, 4096, _core.Access.READ_WRITE)]
    )
    with pytest.raises(AssertionError, match="page 0 of group 1 is not mapped as recorded in its"):
        memory.core.check()
    assert GROUPS == 2


@pytest.mark.parametrize("call", range(1, 16))
def test_a_slot_that_eviction_cut_short_is_sealed_no_further_than_it_shows(call: int) -> None:
    """A newcomer takes a sealed slot, its tail is evicted for another, and the driver refuses."""
    memory = make_memory(limit_pages=6, prefix_caching=False, seal_read_only=True)
    memory.release(memory.start(PROMPT[:16]))  # its slot shows four sealed pages
    first, second = memory.open([1] * 4), memory.open([2] * 16)
    ops = [grow(first, 4), grow(second, 16)]
    plan = memory.core.plan(ops)
    memory.faults.arm(call)
    with pytest.raises((DriverError, OutOfMemoryError)):
        memory.core.apply(ops, plan.version)
    memory.core.check()
    memory.do(*ops)
    assert memory.core.stats().pages_unmapped_total >= 2
