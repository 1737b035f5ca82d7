"""Memories of several kinds of layers over one limit.

A random walk that is the same on every run belongs to the test suite; a million steps, which print
the driver calls that were refused:
VMSERVE_KINDS_STEPS=1000000 pytest tests/memory/test_kinds.py -k walk --timeout=0 -s

With sanitizers, the thread's also beside the mapper's thread:
scripts/sanitize thread tests/memory/test_kinds.py
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.memory.kinds_model import (
    BLOCK_TOKENS,
    KINDS,
    STATE,
    WHOLE_GROUPS,
    Expected,
    KindsRig,
    LateReads,
    blocks_of,
    make_kinds,
)
from tests.memory.support import PAGE, Op, attach, convert, fork, grow, swap_in, swap_out
from vmserve import _core
from vmserve._core import Health, MapperMode, View, ZeroPolicy
from vmserve.errors import DriverError, OutOfMemoryError

STEPS = int(os.environ.get("VMSERVE_KINDS_STEPS", "2000"))
STEPS_OF_A_WALK = 250
PROMPTS = [[3] * 20, [3] * 9 + [5] * 20, [7, 8] * 12]


def start(rig: KindsRig, tokens: list[int], view: View = View.VIRTUAL, to: int = 0) -> int:
    """A sequence that has computed its tokens, or those up to `to`, after what is cached."""
    seq = rig.core.open(0, view, b"", tokens)
    assert seq is not None
    rig.seqs[seq] = Expected(0, b"", rig.weights, view, list(tokens))
    step(rig, [(seq, to or len(tokens))], [attach(seq, rig.core.match(seq))])
    return seq


def step(rig: KindsRig, grows: list[tuple[int, int]], ops: list[Op] | None = None) -> None:
    plan_ops = [*(ops or []), *(grow(seq, to) for seq, to in grows)]
    plan = rig.core.plan(plan_ops)
    assert plan.fits
    epoch = rig.core.apply(plan_ops, plan.version)
    for seq, to in grows:
        before = rig.core.sealed(seq)
        rig.seqs[seq].length = to
        rig.write(seq, before)
    rig.core.complete(epoch)
    rig.check()


def test_a_window_gives_its_past_up_alone() -> None:
    rig = make_kinds(prefix_caching=0, deferred_reclamation=0)
    seq = start(rig, list(range(1, 41)), to=20)
    for to in range(21, 33):
        step(rig, [(seq, to)])
    dropped = [
        next(i for i, block in enumerate(blocks_of(rig, k, seq)) if block >= 0) for k in range(3)
    ]
    # The step to 32 tokens saw positions 26 to 31 and 21 to 31 of the windows of 6 and 11.
    assert dropped == [0, 26 // 4, 21 // 4]
    used = [stats.used_pages for stats in rig.core.kind_stats()]
    assert used == [8, 8 - 6, 8 - 5]


def test_pages_idle_in_one_kind_serve_another() -> None:
    """What windows have left behind holds a second sequence, which one page of all layers would
    not."""
    rig = make_kinds(limit_pages=10, prefix_caching=0, num_slots=2)
    first = start(rig, list(range(1, 41)), to=4)
    for to in range(8, 33, 4):
        step(rig, [(first, to)])
    second = start(rig, list(range(50, 74)), to=4)
    for to in range(8, 25, 4):
        step(rig, [(second, to)])
    # 8 and 6 pages of every layer would be 14 whole ones.
    assert rig.committed_bytes() <= 10 * WHOLE_GROUPS * PAGE
    assert sum(stats.pages_given_back_total for stats in rig.core.kind_stats()) > 0


@pytest.mark.parametrize("view", [View.VIRTUAL, View.PAGED])
def test_a_hit_is_the_longest_prefix_on_which_all_kinds_agree(view: View) -> None:
    rig = make_kinds(limit_pages=32, num_slots=4)
    prompt = list(range(1, 30))
    rig.core.release(start(rig, prompt, view))
    del rig.seqs[0]
    again = rig.core.open(0, view, b"", prompt)
    assert again is not None
    assert rig.core.match(again) == 28
    rig.core.release(again)
    # Without the window's last blocks, the others' prefix is of no use: both kinds lose it.
    assert rig.core.trim(0, drop_idle=True) > 0
    again = rig.core.open(0, view, b"", prompt)
    assert again is not None
    assert rig.core.match(again) == 0


def test_a_hit_takes_only_what_the_window_sees() -> None:
    rig = make_kinds(limit_pages=32, num_slots=4)
    prompt = list(range(1, 30))
    rig.core.release(start(rig, prompt))
    del rig.seqs[0]
    seq = start(rig, prompt, View.PAGED)
    # 28 tokens were cached. After the 29th is computed, the 30th sees positions 24 and 19 on.
    assert [blocks_of(rig, k, seq).count(-1) for k in range(3)] == [0, 24 // 4, 19 // 4]


def test_a_plan_that_would_not_fit_gives_up_what_windows_have_behind() -> None:
    rig = make_kinds(limit_pages=5, prefix_caching=0)
    seq = start(rig, list(range(1, 61)), to=16)
    used = sum(stats.used_pages for stats in rig.core.kind_stats())
    assert rig.core.plan([grow(seq, 20)]).fits
    assert sum(stats.used_pages for stats in rig.core.kind_stats()) == used
    assert not rig.core.plan([grow(seq, 40)]).fits
    assert sum(stats.used_pages for stats in rig.core.kind_stats()) < used
    rig.check()


def begin(rig: KindsRig, seq: int, to: int) -> int:
    """A step that runs."""
    ops = [grow(seq, to)]
    epoch = rig.core.apply(ops, rig.core.plan(ops).version)
    before, rig.seqs[seq].length = rig.seqs[seq].length, to
    rig.write(seq, before)
    rig.check()
    return epoch


@pytest.mark.parametrize("view", [View.VIRTUAL, View.PAGED])
def test_what_a_running_step_writes_is_cached_before_a_window_gives_it_up(view: View) -> None:
    """The next step is planned meanwhile, and sees nothing of it in the narrow windows."""
    rig = make_kinds(limit_pages=32, num_slots=4)
    prompt = list(range(1, 38))
    seq = start(rig, prompt, view, to=4)
    begin(rig, seq, 24)
    epoch = begin(rig, seq, 37)
    assert [blocks_of(rig, k, seq).count(-1) for k in range(3)] == [0, 0, 0]
    rig.core.complete(epoch - 1)
    rig.check()
    # The running step begins at 24 and sees 19 and 14 on.
    assert [blocks_of(rig, k, seq).count(-1) for k in range(3)] == [0, 19 // 4, 14 // 4]
    rig.core.complete(epoch)
    again = rig.core.open(0, view, b"", prompt[:18])
    assert again is not None
    assert rig.core.match(again) == 16


def test_an_epoch_ends_in_all_kinds_at_once() -> None:
    """When the last of their drivers says that the device has done its work."""
    rig = make_kinds(limit_pages=32, late_marks=True)
    seq = start(rig, list(range(1, 38)), to=8)
    epoch = begin(rig, seq, 24)
    rig.core.launched(epoch)
    for part in rig.parts:
        assert rig.core.completed_epoch == epoch - 1
        part.faults.reach_marks(1)
        rig.core.plan([])
        rig.check()
    assert rig.core.completed_epoch == epoch


def test_a_plan_that_is_short_tells_that_running_steps_will_give_up_pages() -> None:
    rig = make_kinds(limit_pages=6, prefix_caching=0)
    seq = start(rig, list(range(1, 61)), to=4)
    epoch = begin(rig, seq, 20)
    short = rig.core.plan([grow(seq, 28)])
    assert not short.fits
    assert short.waiting_pages > 0
    rig.core.complete(epoch)
    assert rig.core.plan([grow(seq, 28)]).fits


def test_a_shortfall_of_one_kind_leaves_all_as_they_were() -> None:
    rig = make_kinds(limit_pages=4)
    seq = start(rig, list(range(1, 17)), to=16)
    rig.core.plan([grow(seq, 40)])  # gives up what windows have behind
    before = rig.core.fingerprint()
    plan = rig.core.plan([grow(seq, 40)])
    assert not plan.fits
    assert plan.needed_pages > plan.available_pages
    assert rig.core.fingerprint() == before
    with pytest.raises(OutOfMemoryError, match="pages"):
        rig.core.apply([grow(seq, 40)], plan.version)
    rig.check()


def test_kinds_that_are_short_together_pack_their_blocks() -> None:
    """Each alone could have what it needs."""
    rig = make_kinds(blocks_per_page=2, limit_pages=3, prefix_caching=0)
    seq = start(rig, list(range(1, 41)), View.PAGED, to=4)
    other = start(rig, list(range(50, 54)), View.PAGED)
    step(rig, [(seq, 8)])  # its second block is not beside the first
    rig.core.release(other)
    del rig.seqs[other]
    step(rig, [(seq, 24)])
    assert rig.committed_bytes() == 3 * WHOLE_GROUPS * PAGE


def test_kinds_that_are_short_together_wait_for_their_mappers() -> None:
    rig = make_kinds(
        limit_pages=4, prefix_caching=0, mapper=MapperMode.MANUAL, lookahead_tokens=8, grow_pages=4
    )
    seq, other = (rig.core.open(0, View.VIRTUAL, b"", list(range(40))) for _ in range(2))
    assert seq is not None
    assert other is not None
    rig.core.complete(rig.core.apply([grow(seq, 4)], rig.core.plan([grow(seq, 4)]).version))
    assert sum(stats.held_pages for stats in rig.core.kind_stats()) > 0
    assert rig.core.plan([grow(other, 12)]).fits


def test_a_lowered_limit_takes_the_oldest_pages_of_all_kinds() -> None:
    rig = make_kinds(limit_pages=16)
    for first in (1, 60):
        seq = start(rig, list(range(first, first + 16)))
        rig.core.release(seq)
        del rig.seqs[seq]
    rig.core.set_limit(4)
    assert rig.committed_bytes() <= 4 * WHOLE_GROUPS * PAGE
    matched = []
    for first in (1, 60):
        seq = rig.core.open(0, View.PAGED, b"", list(range(first, first + 17)))
        assert seq is not None
        matched.append(rig.core.match(seq))
    assert matched == [0, 16]


@pytest.mark.parametrize("view", [View.VIRTUAL, View.PAGED])
def test_who_needs_no_page_goes_on_above_a_lowered_limit(view: View) -> None:
    rig = make_kinds(limit_pages=16)
    seq = start(rig, list(range(1, 20)), view, to=18)
    rig.core.set_limit(1)
    assert rig.committed_bytes() > WHOLE_GROUPS * PAGE
    step(rig, [(seq, 19)])
    assert not rig.core.plan([grow(seq, 29)]).fits


def test_pages_that_were_found_go_last_up_to_an_eighth() -> None:
    """A prompt that was found once outlives two others that were used later, in a pool so large
    that its pages are no more than an eighth."""
    rig = make_kinds(limit_pages=64, max_pages=64)
    for first in (*range(100, 240, 20), 1, 1, 60, 80):
        rig.core.release(start(rig, list(range(first, first + 17)), View.PAGED))
        rig.seqs.clear()
    rig.core.trim(4, drop_idle=True)
    matched = []
    for first in (1, 60, 80):
        seq = rig.core.open(0, View.PAGED, b"", list(range(first, first + 17)))
        assert seq is not None
        matched.append(rig.core.match(seq))
    assert matched == [16, 0, 0]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_refusal_in_any_kind_undoes_all(kind: int) -> None:
    """Of each driver call of a step that maps, copies and forks."""
    for call in range(1, 100):
        rig = make_kinds(limit_pages=32, num_slots=4)
        parent = start(rig, list(range(1, 41)), to=14)
        child = rig.core.open(0, View.VIRTUAL, b"", [])
        assert child is not None
        ops = [fork(child, parent, 14), grow(child, 18), grow(parent, 18)]
        plan = rig.core.plan(ops)
        assert plan.fits
        rig.parts[kind].faults.arm(call)
        try:
            rig.core.apply(ops, plan.version)
        except (DriverError, OutOfMemoryError):
            rig.parts[kind].faults.disarm()
            rig.check()  # the parent is as it was
            assert rig.core.length(child) == 0
            assert rig.core.begun_epoch == 1
            assert rig.core.stats().health is Health.HEALTHY
            continue
        break
    assert call > 3


def test_a_failed_plan_is_not_applied_by_the_next() -> None:
    """Nor by one without ops, which plans of its own do not count."""
    rig = make_kinds(limit_pages=32)
    seq = start(rig, list(range(1, 13)), to=8)
    ops = [convert(seq, View.PAGED), grow(seq, 12)]
    version = rig.core.plan(ops).version
    rig.parts[1].faults.arm(1, forever=True)
    with pytest.raises((DriverError, OutOfMemoryError)):
        rig.core.apply(ops, version)
    rig.parts[1].faults.disarm()
    rig.core.complete(rig.core.apply([], rig.core.plan([]).version))
    rig.check()


def state_rig(**options: int) -> KindsRig:
    return make_kinds(limit_pages=32, num_slots=4, has_state=True, **options)


def matched(rig: KindsRig, prompt: list[int]) -> int:
    seq = rig.core.open(0, View.PAGED, b"", prompt)
    assert seq is not None
    found = rig.core.match(seq)
    rig.core.release(seq)
    return found


@pytest.mark.parametrize("view", [View.VIRTUAL, View.PAGED])
def test_a_state_is_one_page_of_any_length(view: View) -> None:
    rig = state_rig()
    seq = start(rig, list(range(1, 41)), view, to=5)
    [page] = blocks_of(rig, STATE, seq)
    for to in range(6, 41):
        if to == 20:
            rig.seqs[seq].view = View.PAGED
        step(rig, [(seq, to)], [convert(seq, rig.seqs[seq].view)])
        published = to - 1 in (8, 16, 24, 32, 36)
        [now] = blocks_of(rig, STATE, seq)
        assert (now != page) is published, to  # a checkpoint stays as it was
        page = now
    assert rig.core.kind_stats()[STATE].used_pages == 1


def test_a_state_is_hit_at_its_checkpoints() -> None:
    rig = state_rig()
    prompt = list(range(1, 31))
    seq = rig.core.open(0, View.PAGED, b"", prompt)
    assert seq == 0
    rig.seqs[0] = Expected(0, b"", 0, View.PAGED, prompt)
    for to in (8, 15, 20, 28, 30):
        step(rig, [(0, to)])
    # Steps ended at 8, a multiple, and 28, the last whole block before the last token; at 20, too,
    # which is neither.
    assert [matched(rig, prompt[:n]) for n in (30, 29, 28, 9, 8)] == [28, 28, 8, 8, 0]
    again = start(rig, prompt[:29])
    rig.check()
    assert rig.core.kind_stats()[STATE].cow_blocks_total == 3  # behind 8, 28 and the hit
    rig.core.release(again)
    del rig.seqs[again]


def test_a_state_that_the_next_step_overwrites_is_no_checkpoint() -> None:
    """Steps that are begun before the one before them is complete."""
    rig = state_rig()
    prompt = list(range(1, 13))
    seq = rig.core.open(0, View.PAGED, b"", prompt)
    assert seq is not None
    for to in (8, 12):
        plan = rig.core.plan([grow(seq, to)])
        epoch = rig.core.apply([grow(seq, to)], plan.version)
    rig.core.complete(epoch)
    assert matched(rig, prompt) == 0


def test_sequences_that_share_a_state_write_to_copies() -> None:
    rig = state_rig()
    parent = start(rig, list(range(1, 15)), to=10)
    child = rig.core.open(0, View.VIRTUAL, b"", [])
    assert child is not None
    rig.seqs[child] = Expected(0, b"", 0, View.VIRTUAL, [*range(1, 11), 7, 7])
    step(rig, [(child, 12), (parent, 11)], [fork(child, parent, 10)])
    assert blocks_of(rig, STATE, child) != blocks_of(rig, STATE, parent)
    again = rig.core.open(0, View.VIRTUAL, b"", [])
    assert again is not None
    with pytest.raises(ValueError, match="its state is that of 11"):
        rig.core.plan([fork(again, parent, 10)])


def test_gauges_of_kinds_are_those_of_all_of_them() -> None:
    """In blocks and pages of all layers; a state counts as as many bytes."""
    rig = make_kinds(has_state=True, limit_pages=32, swap_blocks=8)
    first = start(rig, [3] * 20)
    second = start(rig, [3] * 20 + [4], View.PAGED)
    plan = rig.core.plan([swap_out(first)])
    rig.core.complete(rig.core.apply([swap_out(first)], plan.version))
    parts = rig.core.kind_stats()
    stats = rig.core.stats()
    whole = WHOLE_GROUPS * PAGE
    for name in ("used", "shared", "cached", "swap", "swap_capacity", "copying"):
        name += "_blocks"
        num_bytes = sum(getattr(part, name) * part.page_bytes for part in parts)
        assert getattr(stats, name) == num_bytes // whole, name
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
    memory.complete(memory.apply([grow(seq, 4)], memory.plan([grow(seq, 4)]).version))
    memory.release(seq)
    idle = memory.stats().idle_pages
    assert memory.trim(2**52, drop_idle=True) == 0
    assert memory.stats().idle_pages == idle == 4


def test_a_state_takes_no_drafts() -> None:
    rig = state_rig()
    seq = start(rig, list(range(1, 15)), to=10)
    with pytest.raises(ValueError, match="rejected drafts"):
        rig.core.plan_step(np.array([[seq, 12, 0, 1]]))


@pytest.mark.parametrize("call", range(1, 16))
def test_a_refusal_while_a_memory_is_made_leaves_none(call: int) -> None:
    try:
        rig = make_kinds(refused_call=call, num_slots=2, max_pages=16, limit_pages=8, null_page=1)
    except (DriverError, OutOfMemoryError):
        return
    assert not rig.num_refused()
    rig.check()


class Walk:
    """A random life of a memory: plans of several sequences, refusals, lowered limits."""

    def __init__(self, seed: int, mapper: MapperMode | None = None) -> None:
        self.rng = rng = random.Random(seed)
        drawn = rng.choice([MapperMode.OFF, MapperMode.MANUAL])
        mapper = drawn if mapper is None else mapper
        self.rig = make_kinds(
            blocks_per_page=rng.choice([1, 2]),
            num_slots=rng.randint(1, 4),
            limit_pages=rng.randint(6, 24),
            zero_policy=rng.choice([ZeroPolicy.ALWAYS, ZeroPolicy.TENANT, ZeroPolicy.NEVER]),
            mapper=mapper,
            grow_pages=rng.randint(1, 3),
            lookahead_tokens=rng.choice([0, 8]),
            eager_slots=rng.randint(0, 1),
            swap_blocks=rng.choice([0, 12, 200]),
            null_page=rng.random() < 0.3,
            deferred_reclamation=rng.random() < 0.8,
            seal_read_only=rng.random() < 0.5,
            has_state=rng.random() < 0.5,
            late_copies=rng.random() < 0.3,
            late_marks=rng.random() < 0.5,
            faulty_member=rng.choice([None, 0, 1]),
            sizes=rng.choice([(1, 1, 1), (2, 1, 3), (1, 3, 1)]),
        )
        self.whole = self.rig.core.stats().page_bytes
        self.limit = self.rig.core.stats().limit_pages * self.whole
        self.is_background = mapper is not MapperMode.OFF
        #: Epochs, who grows in them, and what their kernels read.
        self.running: list[tuple[int, list[int], list[LateReads]]] = []
        #: Of each fork, those whose blocks it may still have.
        self.forebears: dict[int, set[int]] = {}

    def step(self) -> None:
        rng, core = self.rng, self.rig.core
        self.arm()
        roll = rng.random()
        if roll < 0.6:
            self.plan_and_apply()
        elif roll < 0.75:
            self.release()
        elif roll < 0.9:
            self.complete()
        elif roll < 0.94:
            self.attempt(lambda: core.trim(rng.randint(0, 6), rng.random() < 0.5))
        elif roll < 0.98:
            pages = rng.randint(5, 24)
            self.limit = pages * self.whole
            self.attempt(lambda: core.set_limit(pages))
        elif self.is_background:
            core.settle_mapper()
        else:
            self.copy_late()
        if rng.random() < 0.7:
            self.disarm()
        self.rig.check()

    @property
    def is_healthy(self) -> bool:
        return self.rig.core.stats().health is Health.HEALTHY

    def arm(self) -> None:
        if self.rng.random() < 0.3:
            driver = self.rng.choice(self.rig.parts).faults
            call = self.rng.choice([1, 1, 2, 3, 5, 12])
            driver.arm(call, forever=self.rng.random() < 0.3)

    def disarm(self) -> None:
        for part in self.rig.parts:
            part.faults.disarm()

    def attempt(self, call: Any) -> bool:
        try:
            call()
        except (DriverError, OutOfMemoryError):
            return False
        return True

    def open(self) -> int | None:
        rng, rig = self.rng, self.rig
        prompt = rng.choice(PROMPTS)
        tokens = prompt[: rng.randint(1, len(prompt))] + [rng.randint(1, 3)] * rng.randint(0, 6)
        tenant, salt = rng.choice([0, 0, 1]), rng.choice([b"", b"", b"s"])
        view = rng.choice([View.VIRTUAL, View.PAGED])
        seq = rig.core.open(tenant, view, salt, tokens)
        if seq is not None:
            rig.seqs[seq] = Expected(tenant, salt, rig.weights, view, tokens)
        return seq

    def op_of(self, number: int) -> tuple[list[Op], Expected]:
        """Ops of a sequence in one plan, and what it is after them."""
        rng, rig = self.rng, self.rig
        was = rig.seqs[number]
        seq = Expected(**{**vars(was), "tokens": list(was.tokens)})
        ops: list[Op] = []
        busy = any(number in grown for _, grown, _ in self.running)
        if seq.swapped:
            ops.append(swap_in(number))
            seq.swapped = False
        elif seq.length == 0:
            hit = rig.core.match(number)
            assert hit < len(seq.tokens)
            ops.append(attach(number, hit))
            seq.length = hit
        elif rng.random() < 0.15 and not busy:
            ops.append(swap_out(number))
            seq.swapped = True
            return ops, seq
        elif rng.random() < 0.15:
            seq.view = View.PAGED if seq.view is View.VIRTUAL else View.VIRTUAL
            ops.append(convert(number, seq.view))
        if seq.length == len(seq.tokens) and seq.length < rig.max_len:
            seq.tokens.append(rng.randint(1, 3))
        to = rng.randint(seq.length, len(seq.tokens))
        if to > seq.length:
            ops.append(grow(number, to))
            seq.length = to
        return ops, seq

    def fork_of(self, taken: list[int]) -> tuple[list[Op], int, Expected] | None:
        rig = self.rig
        parents = [
            number
            for number, seq in rig.seqs.items()
            if seq.length > 0 and not seq.swapped and number not in taken
        ]
        if not parents:
            return None
        parent = self.rng.choice(parents)
        was = rig.seqs[parent]
        length = self.fork_length(was)
        child = rig.core.open(was.tenant, self.rng.choice([View.VIRTUAL, View.PAGED]), was.salt, [])
        if child is None:
            return None
        view = rig.core.view(child)
        copy = Expected(was.tenant, was.salt, was.weights, view, was.tokens[:length])
        copy.length = length
        self.forebears[child] = {parent} | self.forebears.get(parent, set())
        return [fork(child, parent, length)], child, copy

    def fork_length(self, was: Expected) -> int:
        """Also before the parent's end, if no window can have given anything up: the scheduler's
        rule (``Families``)."""
        narrowest = min(window for window, _ in KINDS if window)
        may_be_earlier = was.length <= narrowest and len(self.rig.parts) == len(KINDS)
        return self.rng.randint(1, was.length) if may_be_earlier else was.length

    def plan_and_apply(self) -> None:
        rng, rig = self.rng, self.rig
        if len(rig.seqs) < 2 or rng.random() < 0.4:
            self.open()
        numbers = rng.sample(sorted(rig.seqs), min(len(rig.seqs), rng.randint(1, 3)))
        after: dict[int, Expected] = {}
        ops: list[Op] = []
        for number in numbers:
            own, after[number] = self.op_of(number)
            ops += own
        child = None
        if rng.random() < 0.15 and (forked := self.fork_of(numbers)) is not None:
            own, child, after_fork = forked
            ops += own
            rig.seqs[child] = Expected(**{**vars(after_fork), "length": 0})
            after[child] = after_fork
        before = rig.core.fingerprint()
        # A plan may execute what the mapper has in hand, repair, and return what a limit forbids;
        # one that would not fit gives up what windows have behind.
        is_still = (
            not self.is_background
            and self.is_healthy
            and rig.committed_bytes() <= self.limit
            and not rig.core.is_copying()
            and not any(self.has_past(number) for number in rig.seqs)
        )
        plan = rig.core.plan(ops)
        assert not is_still or rig.core.fingerprint() == before
        calls = [part.faults.num_calls for part in rig.parts]
        applied = plan.fits and self.apply(ops, plan.version, after, calls)
        if not applied and child is not None:
            self.release_one(child)

    def has_past(self, number: int) -> bool:
        rig, seq = self.rig, self.rig.seqs[number]
        return not seq.swapped and any(
            block >= 0
            for k in range(len(KINDS))
            for block in blocks_of(rig, k, number)[: rig.first_seen(seq, k) // BLOCK_TOKENS]
        )

    def apply(self, ops: list[Op], version: int, after: dict[int, Expected], calls: Any) -> bool:
        rig = self.rig
        epochs: list[int] = []
        if not self.attempt(lambda: epochs.append(rig.core.apply(ops, version))):
            self.disarm()
            return False
        grown = [number for number, seq in after.items() if seq.length > rig.seqs[number].length]
        starts = {number: rig.seqs[number].length for number in after}
        hits = {op[1]: op[2] for op in ops if op[0].name in ("ATTACH", "FORK")}
        names = [], []
        for number, seq in after.items():
            was = rig.seqs[number]
            new = seq.tokens[len(was.tokens) :]
            names[0].extend([number] * len(new))
            names[1].extend(new)
            rig.seqs[number] = seq
        rig.core.append_tokens(*names)
        reads = []
        for number in grown:
            start = max(starts[number], hits.get(number, 0))
            forebears = self.forebears.get(number, set())
            shared = [each for each in self.late_reads() if each.number in forebears]
            for each in shared:
                each.check()
            rig.write(number, start)
            for each in shared:
                each.accept()
            reads += rig.late_reads(number, start)
        self.running.append((epochs[0], [*after], reads))
        if self.rng.random() < 0.6:
            self.complete()
        return True

    def complete(self) -> None:
        if not self.running:
            return
        core = self.rig.core
        for each in self.late_reads():
            each.check()
        if self.rng.random() < 0.05:
            core.abandon_epoch(self.running[-1][0])  # its kernels failed, so its requests do
            for seq in {seq for _, grown, _ in self.running for seq in grown} & {*self.rig.seqs}:
                self.release_one(seq)
            self.running.clear()
            return
        num_ended = self.rng.randint(1, len(self.running))
        epoch = self.running[num_ended - 1][0]
        if self.rng.random() < 0.4 and self.attempt(lambda: core.launched(epoch)):
            # Finds the marks that are reached, of some drivers and then of all.
            for part in self.rig.parts:
                if self.rng.random() < 0.5:
                    core.plan([])
                part.faults.reach_marks(1 << 20)
            core.plan([])
        core.complete(epoch)
        del self.running[:num_ended]

    def copy_late(self) -> None:
        """Let copies to the host's memory run, or wait for them."""
        if self.rng.random() < 0.3:
            self.rig.core.finish_copies()
        for part in self.rig.parts:
            part.faults.run_copies(self.rng.randint(0, 4))

    def release(self) -> None:
        if self.rig.seqs:
            self.release_one(self.rng.choice(sorted(self.rig.seqs)))

    def release_one(self, seq: int) -> None:
        self.rig.core.release(seq)
        del self.rig.seqs[seq]
        self.forebears.pop(seq, None)
        for others in self.forebears.values():
            others.discard(seq)
        for each in self.late_reads():
            each.is_released = each.is_released or each.number == seq

    def late_reads(self) -> list[LateReads]:
        return [each for _, _, reads in self.running for each in reads]

    def end(self) -> None:
        """Everything comes back."""
        self.disarm()
        while self.running:
            self.complete()
        for seq in [*self.rig.seqs]:
            self.release_one(seq)
        self.rig.core.settle_mapper()
        self.rig.core.trim(0, drop_idle=True)  # waits for the copies
        self.rig.check()
        assert self.is_healthy
        assert all(stats.committed_pages <= 1 for stats in self.rig.core.kind_stats())


def walk(seed: int, mapper: MapperMode | None = None) -> Counter[str]:
    """One random life; returns the driver calls that were refused."""
    life = Walk(seed, mapper)
    for _ in range(STEPS_OF_A_WALK):
        life.step()
    life.end()
    return life.rig.num_refused()


@pytest.fixture(scope="module")
def refused() -> Iterator[Counter[str]]:
    total: Counter[str] = Counter()
    yield total
    print(f"refused: {dict(total)}")


@pytest.mark.parametrize("seed", range(STEPS // STEPS_OF_A_WALK))
@pytest.mark.slow
def test_a_random_walk(seed: int, refused: Counter[str]) -> None:
    refused.update(walk(seed))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_a_random_walk_beside_the_mappers_thread(seed: int) -> None:
    walk(seed, MapperMode.THREAD)


@pytest.mark.slow
def test_walks_refuse_every_call_of_a_life() -> None:
    """Of what a driver does, only its reservations are made once."""
    calls = {
        *("alloc_host", "copy", "copy_in", "copy_mark", "copy_out", "create", "destroy", "fence"),
        *("free_host", "map", "mark", "set_access", "unmap", "zero"),
    }
    refused: Counter[str] = Counter()
    for seed in range(60):
        refused.update(walk(seed))
        if calls <= {*refused}:
            break
    assert {*refused} == calls
