"""The memory core and its model side by side: every call is checked, every byte read back.

Small shapes: 2 groups, pages of one granule (4 KiB), so that a token has 4096 / page_tokens bytes.
"""

from __future__ import annotations

import math
import shutil
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.memory.groups import everywhere, with_another
from tests.memory.model import Model
from tests.memory.model_types import (
    NO_BLOCK,
    VALUES_PER_TENANT,
    Kind,
    Observation,
    Op,
    PlanSeen,
    Seen,
    Shape,
    Write,
    readable_values,
)
from vmserve import _core
from vmserve._core import MapperMode, OpKind, View, ZeroPolicy
from vmserve.errors import DriverError, OutOfMemoryError

PAGE = 4096
GROUPS = 2

KINDS = {
    Kind.ATTACH: OpKind.ATTACH,
    Kind.FORK: OpKind.FORK,
    Kind.CONVERT: OpKind.CONVERT,
    Kind.SWAP_OUT: OpKind.SWAP_OUT,
    Kind.SWAP_IN: OpKind.SWAP_IN,
    Kind.GROW: OpKind.GROW,
}
REFUSALS = (DriverError, OutOfMemoryError)


def as_view(paged: bool) -> View:
    return View.PAGED if paged else View.VIRTUAL


def as_step(ops: Sequence[Op]) -> tuple[NDArray[np.int64], list[Any]]:
    """`ops` as the core takes them in a step: growths as an array, and the others."""
    grows = [op for op in ops if op.kind is Kind.GROW]
    rows = [(op.seq, op.num_tokens, op.first_token, op.num_drafted) for op in grows]
    others = [as_tuple(op) for op in ops if op.kind is not Kind.GROW]
    return np.array(rows, np.int64).reshape(-1, 4), others


def as_tuple(op: Op) -> tuple[OpKind, int, int, int, int, View]:
    """`op` as the core takes it."""
    view = as_view(op.paged)
    return (KINDS[op.kind], op.seq, op.num_tokens, op.first_token, op.other, view)


def observe(core: Any, seqs: Iterable[int], num_slots: int) -> Observation:
    """What can be seen of the core from outside; its block tables must say the same."""
    stats = core.stats()  # first: it finds out what has ended
    found = {seq: _see(core, seq) for seq in seqs}
    listed = {b for seen in found.values() for b in seen.blocks if b != NO_BLOCK}
    return Observation(
        seqs=found,
        slots={slot: tuple(map(int, core.slot_pages(slot))) for slot in range(num_slots)},
        refs={block: int(core.block_refs(block)) for block in sorted(listed)},
        begun=core.begun_epoch,
        completed=core.completed_epoch,
        evictions=stats.evicted_blocks_total,
        packings=stats.compactions_total,
    )


def _see(core: Any, seq: int) -> Seen:
    swapped = core.swapped(seq)
    blocks = () if swapped else tuple(map(int, core.blocks(seq)))
    row = core.block_tables()[seq]
    expected = [max(block, 0) for block in blocks]
    assert row[: len(blocks)].tolist() == expected, f"block table of {seq}: {row}, {blocks}"
    assert not row[len(blocks) :].any(), f"block table of {seq} goes on: {row}, {blocks}"
    return Seen(
        blocks=blocks,
        length=core.length(seq),
        sealed=core.sealed(seq),
        paged=core.view(seq) is View.PAGED,
        swapped=swapped,
        slot=core.slot(seq),
    )


@dataclass(frozen=True)
class Options:
    """What a memory is built with; `shape` is what the model knows of it."""

    shape: Shape
    limit_pages: int
    grow_pages: int = 1
    zero_policy: ZeroPolicy = ZeroPolicy.TENANT
    deferred_reclamation: bool = True
    seal_read_only: bool = True
    access_under_readers: bool = True
    mapper: MapperMode = MapperMode.OFF
    lookahead_tokens: int = 0
    eager_slots: int = 0
    eager_pages: int = 0
    shadow: bool = False
    #: Of the process, as the system limits them; 0: as it really does.
    max_map_count: int = 0
    #: Over a group of two drivers, of which this one refuses and copies late.
    faulty_member: int | None = None
    #: Published blocks are kept in files, and read back.
    persists: bool = False


@dataclass
class Fault:
    """The call-th call of the driver fails, once or with every later one."""

    call: int
    forever: bool = False


@dataclass
class Rig:
    options: Options
    core: Any = field(init=False)
    faults: _core.FaultInjectingDriver = field(init=False)
    driver: _core.PageDriver = field(init=False)
    model: Model = field(init=False)
    values: dict[int, NDArray[np.uint8]] = field(default_factory=dict)  # [groups, max_len]
    #: The driver's marks behind what each plan swapped out, while the model has them as copied.
    copy_marks: list[int] = field(default_factory=list)
    #: The directory of stored blocks; it goes with the rig.
    files: Path | None = None

    def __post_init__(self) -> None:
        options, shape = self.options, self.options.shape
        host = _core.HostDriver(PAGE, GROUPS * shape.max_pages, max_map_count=options.max_map_count)
        self.faults = _core.FaultInjectingDriver(host, late_copies=shape.copies_late)
        self.driver = with_another(
            self.faults, options.faulty_member, max_map_count=options.max_map_count
        )
        self.core = _core.KVMemory(
            [{"driver": self.driver}],
            num_groups=GROUPS,
            block_tokens=shape.block_tokens,
            blocks_per_page=shape.blocks_per_page,
            token_bytes=PAGE // shape.page_tokens,
            max_seqs=shape.max_seqs,
            num_slots=shape.num_slots,
            max_len=shape.max_len,
            read_slack=shape.read_slack,
            limit_pages=options.limit_pages,
            max_pages=shape.max_pages,
            grow_pages=options.grow_pages,
            zero_policy=options.zero_policy,
            prefix_caching=shape.prefix_caching,
            null_page=shape.null_page,
            deferred_reclamation=options.deferred_reclamation,
            seal_read_only=options.seal_read_only,
            access_under_readers=options.access_under_readers,
            swap_blocks=shape.swap_blocks,
            mapper=options.mapper,
            lookahead_tokens=options.lookahead_tokens,
            eager_slots=options.eager_slots,
            eager_pages=options.eager_pages,
        )
        per_run = GROUPS * (2 if options.shadow else 1)
        self.model = Model(replace(shape, mappings_per_run=per_run), options.limit_pages)
        if options.shadow:
            self.core.shadow_buffer(0)
        if options.persists:
            self.files = Path(mkdtemp())
            weakref.finalize(self, shutil.rmtree, self.files)
            (self.files / "s").mkdir()
            directory = _core.StoreDirectory(str(self.files), 40 * GROUPS * PAGE)
            self.core.persist_to([directory.space("s", bytes(32))])

    # -- looking

    def observe(self) -> Observation:
        return observe(self.core, self.model.seqs, self.options.shape.num_slots)

    def arena(self, group: int) -> NDArray[np.uint8]:
        """uint8 ``[blocks, block_tokens, token_bytes]``; only what is mapped may be touched."""
        shape = self.options.shape
        buffer: NDArray[np.uint8] = self.core.arena_buffer(group)
        return buffer.reshape(-1, shape.block_tokens, PAGE // shape.page_tokens)

    def slot(self, slot: int, group: int) -> NDArray[np.uint8]:
        """uint8 ``[tokens, token_bytes]``; only what is mapped may be touched."""
        row: NDArray[np.uint8] = self.core.slots_buffer(group)[slot]
        return row.reshape(-1, PAGE // self.options.shape.page_tokens)

    def is_mapped(self, address: int) -> bool:
        return self.driver.query(address)[0] >= 0

    # -- doing

    def open(
        self,
        tenant: int = 0,
        *,
        paged: bool = False,
        salt: bytes = b"",
        stream: Sequence[int] = (),
        known: int = 0,
        private: bool = False,
    ) -> int | None:
        """A sequence whose tokens are `stream`; the memory is told the first `known`."""
        max_len = self.options.shape.max_len
        tokens = [*stream, *[1] * (max_len - len(stream))]
        told = [] if private else tokens[:known]
        seq: int | None = self.core.open(tenant=tenant, view=as_view(paged), salt=salt, tokens=told)
        self.model.open(
            seq,
            tenant=tenant,
            paged=paged,
            salt=salt,
            stream=tokens,
            known=len(told),
            private=private,
        )
        if seq is not None:
            self.values.pop(seq, None)
            self.model.opened(self.observe())
        return seq

    def restore(self, seq: int, fault: Fault | None = None) -> None:
        """What is stored of the empty sequence's prefix is read, now or when jobs are run."""
        self.under(fault, lambda: self.core.restore(seq))
        self.quiet()

    def damage_files(self, number: int) -> None:
        """A bit of a file flips, or a file is lost."""
        files = [] if self.files is None else sorted((self.files / "s").iterdir())
        for file in files[number % 3 :: 3]:
            content = bytearray(file.read_bytes())
            content[number % len(content)] ^= 1 << number % 8
            file.write_bytes(content)
        for file in files[number % 7 :: 7]:
            file.unlink()

    def match(self, seq: int) -> int:
        matched = int(self.core.match(seq))
        self.model.check_match(seq, matched)
        return matched

    def plan(self, ops: Sequence[Op]) -> Any:
        stats = self.see_copies()
        plan = self.core.plan_step(*as_step(ops))
        self.quiet()
        after = self.core.stats()
        attaches = any(op.kind is Kind.ATTACH for op in ops)
        if ops and not attaches and not self.core.last_error():
            held = after.held_pages + after.quarantined_pages
            self.model.check_limit(after.committed_pages, held)
        self.model.check_plan(
            ops,
            PlanSeen(
                plan.needed_pages,
                plan.available_pages,
                plan.missing_slots,
                plan.fits,
                plan.needed_mappings,
                excess=plan.excess_pages,
            ),
            held=stats.held_pages + stats.quarantined_pages,
            free_mappings=math.inf if plan.fits else self.free_mappings(),
        )
        return plan

    def free_mappings(self) -> float:
        """How many can be made, with every slot unmapped that nobody has or reads."""
        stats = self.core.stats()
        if stats.pending_repairs:
            return 0
        used = {seen.slot for seen in self.model.seen.seqs.values()}
        kept = used | self.model.left_slots.keys()
        return self.driver.stats().max_mappings - self.count_mappings(kept)

    def count_mappings(self, slots: Container[int | None] | None = None) -> int:
        """Maximal runs of what is mapped alike, and of what is not, page by page as the driver
        tells; of the slots only `slots`, as if nothing were mapped in the others."""
        count = 0
        for group in range(GROUPS):
            arena, rows = self.core.arena_buffer(group), self.core.slots_buffer(group)
            ranges = [
                (arena.ctypes.data, arena.nbytes, False),
                (rows.ctypes.data, rows.nbytes, True),
            ]
            if self.options.shadow:
                shadow = self.core.shadow_buffer(group)
                ranges.append((shadow.ctypes.data, shadow.nbytes, True))
            for base, num_bytes, has_slots in ranges:
                last: tuple[int, object] | None = None
                for offset in range(0, num_bytes, PAGE):
                    frame, access = self.driver.query(base + offset)
                    slot = offset // rows.strides[0]
                    if has_slots and slots is not None and slot not in slots:
                        frame = -1
                    joins = last is not None and (
                        (frame < 0 and last[0] < 0) or (frame >= 0 and last == (frame - 1, access))
                    )
                    count += not joins
                    last = (frame, access)
        return count

    def step(self, ops: Sequence[Op], fault: Fault | None = None) -> bool:
        """Plans, applies, and writes what the epoch is to write. False: it did not fit, or the
        driver refused; then nothing changed."""
        if not (plan := self.plan(ops)).fits:
            return False
        before, lengths = self.model.seen, {s: m.length for s, m in self.model.seqs.items()}
        committed = self.core.stats().committed_pages
        read_late = [b for b, e in self.model.waiting.items() if e > self.model.completed]
        read_late += self.model.copied
        contents = [self.arena(group)[read_late] for group in range(GROUPS)]
        rows, others = as_step(ops)
        epoch = self.under(fault, lambda: self.core.apply_step(rows, plan.version, others))
        for group in range(GROUPS):
            late = self.arena(group)[read_late]
            assert (late == contents[group]).all(), f"one of {read_late} changed, which wait"
        if epoch is None:
            return False
        writes = self.model.apply(ops, epoch, self.observe())
        if len(self.model.copies) > len(self.copy_marks):
            self.copy_marks.append(self.faults.copy_mark())
        for op in ops:
            if op.kind is Kind.FORK:
                self.values.pop(op.seq, None)  # it has its parent's contents
        committed = max(committed, self.model.limit_pages)
        assert self.core.stats().committed_pages <= committed
        for op in ops:
            lengths[op.seq] = max(lengths[op.seq], op.num_tokens if op.kind is not Kind.GROW else 0)
        self.check_handed_out(before, {op.seq: lengths[op.seq] for op in ops})
        for write in writes:
            self.write(write)
        return True

    def under(self, fault: Fault | None, call: Callable[[], Any]) -> Any:
        """The call's result; None if the injected fault made it fail, having changed nothing."""
        if fault is None:
            return call()
        self.faults.arm(fault.call, forever=fault.forever)
        try:
            return call()
        except REFUSALS:
            self.faults.disarm()
            self.model.failed(self.observe())
            return None
        finally:
            self.faults.disarm()

    def release(self, seq: int, fault: Fault | None = None) -> None:
        if fault is not None:
            self.faults.arm(fault.call, forever=fault.forever)
        self.core.release(seq)
        self.faults.disarm()
        self.values.pop(seq, None)
        self.model.release(seq, self.observe)

    def keep(self, lengths: dict[int, int]) -> None:
        """Accept drafts; what belongs there is written now, and not by the step that drafted."""
        for seq, length in lengths.items():
            self.write(Write(seq, self.model.begun, self.model.seqs[seq].length, length))
        self.core.keep(list(lengths), list(lengths.values()))
        self.model.keep(lengths, self.observe)

    def append(self, seqs: Sequence[int]) -> None:
        self.core.append_tokens(list(seqs), [self.model.append_token(seq) for seq in seqs])

    def complete(self, epoch: int) -> None:
        self.core.complete(epoch)
        self.model.complete(epoch, self.observe())

    def abandon(self, epoch: int) -> None:
        self.core.abandon_epoch(epoch)
        self.model.abandon(epoch, self.observe())

    def launch(self, epoch: int) -> None:
        """The host's driver has done its work when it returns; the next call finds out."""
        self.core.launched(epoch)
        self.core.stats()
        self.model.complete(epoch, self.observe())

    def clear_cache(self) -> None:
        self.core.clear_cache()
        self.model.clear_cache()
        self.quiet()

    def set_limit(self, limit: int, fault: Fault | None = None) -> None:
        self.model.limit_pages = limit  # it holds even if giving back fails
        self.under(fault, lambda: self.core.set_limit(limit))
        self.quiet()

    def trim(self, keep: int, *, drop_idle: bool, fault: Fault | None = None) -> int | None:
        before = self.core.stats()
        given_back: int | None = self.under(fault, lambda: self.core.trim(keep, drop_idle))
        # A repair that comes to its end first may give back a page of its own.
        if given_back is not None and fault is None and before.pending_repairs == 0:
            assert before.committed_pages - self.core.stats().committed_pages == given_back
        self.quiet()
        return given_back

    def compact(self, fault: Fault | None = None) -> None:
        used = self.see_copies().used_pages
        if (emptied := self.under(fault, self.core.compact)) is None:
            return
        self.model.compact(self.observe())
        assert self.core.stats().used_pages <= used
        assert emptied >= 0

    def run_copies(self, count: int) -> None:
        """Of what is on its way to host memory, the oldest runs arrive."""
        self.faults.run_copies(count)
        self.see_copies()

    def finish_copies(self, fault: Fault | None = None) -> None:
        self.under(fault, self.core.finish_copies)
        self.see_copies()

    def see_copies(self) -> Any:
        """The model learns which copies have ended, from the driver; the core has found out."""
        ended = [mark for mark in self.copy_marks if self.faults.copy_reached(mark)]
        self.copy_marks = self.copy_marks[len(ended) :]
        self.model.copies_ended(len(ended))
        stats = self.core.stats()
        assert stats.copying_blocks >= sum(self.model.copied.values())
        return stats

    def quiet(self) -> None:
        self.model.quiet(self.observe())

    # -- contents

    def expected(self, seq: int) -> NDArray[np.uint8]:
        if seq not in self.values:
            model = self.model.seqs[seq]
            rows = [model.values(group) for group in range(GROUPS)]
            self.values[seq] = np.array(rows, np.uint8)
        return self.values[seq]

    def write(self, write: Write) -> None:
        """As a kernel of the step does: through the sequence's view, nothing but its positions."""
        seen, shape = self.model.seen.seqs[write.seq], self.options.shape
        positions = np.arange(write.start, write.stop)
        for group in range(GROUPS):
            values = self.expected(write.seq)[group, positions, None]
            if write.drafted:  # what another answer would have had there
                values = values[::-1] % VALUES_PER_TENANT + self.first_value(write.seq)
            if seen.slot is not None:
                for slot in everywhere(self.driver, self.slot(seen.slot, group)):
                    slot[positions] = values
            else:
                blocks = np.array(seen.blocks)[positions // shape.block_tokens]
                for arena in everywhere(self.driver, self.arena(group)):
                    arena[blocks, positions % shape.block_tokens] = values

    def first_value(self, seq: int) -> int:
        return self.model.seqs[seq].tenant * VALUES_PER_TENANT + 1

    def check_contents(self) -> None:
        """Every sequence reads back what it wrote or took over, in every view that it has."""
        block_tokens = self.options.shape.block_tokens
        for seq, model in self.model.seqs.items():
            seen = self.model.seen.seqs[seq]
            if model.swapped or model.length == 0:
                continue
            positions = np.arange(model.first, model.length)
            table = np.array(seen.blocks)[positions // block_tokens]
            positions = positions[table != NO_BLOCK]
            table = table[table != NO_BLOCK]
            for group in range(GROUPS):
                values = self.expected(seq)[group, positions, None]
                for arena in everywhere(self.driver, self.arena(group)):
                    found = arena[table, positions % block_tokens]
                    assert (found == values).all(), self._difference(seq, "arena", found, values)
                if seen.slot is None:
                    continue
                for slot in everywhere(self.driver, self.slot(seen.slot, group)):
                    found = slot[positions]
                    assert (found == values).all(), self._difference(seq, "slot", found, values)
        if self.options.shadow and self.core.stats().pending_repairs == 0:
            self._check_shadow()

    def _check_shadow(self) -> None:
        """It shows what the slots show, and zeros where they show nothing."""
        for group in range(GROUPS):
            shadow = self.core.shadow_buffer(group)
            slots = self.core.slots_buffer(group)
            for slot in range(self.options.shape.num_slots):
                for start in range(0, slots.shape[1], PAGE):
                    page, shown = slots[slot, start : start + PAGE], shadow[slot, start:][:PAGE]
                    if self.is_mapped(page.ctypes.data):
                        assert (shown == page).all(), f"the shadow of slot {slot} is not its own"
                    else:
                        assert not shown.any(), f"the shadow of slot {slot} shows what is gone"

    def _difference(
        self, seq: int, where: str, found: NDArray[np.uint8], values: NDArray[np.uint8]
    ) -> str:
        bad = int((found != values).any(axis=1).argmax())
        return (
            f"sequence {seq} reads {set(found[bad].tolist())} for {int(values[bad, 0])} in the"
            f" {where}, at the {bad}th position that it needs; {self.model.seqs[seq]}"
        )

    def check_handed_out(self, before: Observation, lengths: dict[int, int]) -> None:
        """What is new in the tables and not written yet: no other tenant's bytes."""
        shape, policy = self.options.shape, self.options.zero_policy
        if policy is ZeroPolicy.NEVER:
            return
        used = {block // shape.blocks_per_page for block in before.refs}
        for seq, length in lengths.items():
            old = before.seqs[seq].blocks
            for index, block in enumerate(self.model.seen.seqs[seq].blocks):
                if block == NO_BLOCK or block in old:
                    continue
                model = self.model.seqs[seq]
                fresh = (
                    policy is ZeroPolicy.ALWAYS
                    and index * shape.block_tokens >= length
                    and block // shape.blocks_per_page not in used
                )
                allowed = {0} if fresh else set(readable_values(model.tenant))
                self._check_block(block, allowed, f"block {block}, new to sequence {seq}")

    def _check_block(self, block: int, allowed: Iterable[int], what: str) -> None:
        ok = np.zeros(256, bool)
        ok[list(allowed)] = True
        for group in range(GROUPS):
            found = self.arena(group)[block]
            assert ok[found].all(), f"{what}, holds {set(found[~ok[found]].tolist())}"

    def check_isolation(self) -> None:
        """No sequence can read a foreign byte: whole pages in the arena, and all that its slot
        shows, spares included."""
        shape = self.options.shape
        for seq, model in self.model.seqs.items():
            seen, allowed = self.model.seen.seqs[seq], readable_values(model.tenant)
            for block in seen.blocks:
                if block != NO_BLOCK:
                    self._check_block(block, allowed, f"block {block} of sequence {seq}")
            if seen.slot is not None:
                self._check_slot(seen.slot, allowed, shape.page_tokens)
        if shape.null_page:
            for block in range(shape.blocks_per_page):
                self._check_block(block, (0,), "the null page")

    def _check_slot(self, slot: int, allowed: Iterable[int], page_tokens: int) -> None:
        ok = np.zeros(256, bool)
        ok[list(allowed)] = True
        for group in range(GROUPS):
            tokens = self.slot(slot, group)
            for index in range(len(tokens) // page_tokens):
                page = tokens[index * page_tokens : (index + 1) * page_tokens]
                if self.is_mapped(page.ctypes.data):
                    assert ok[page].all(), (
                        f"slot {slot} shows {set(page[~ok[page]].tolist())} at page {index}"
                    )

    # -- the books

    def check(self) -> None:
        """The core's own laws, and its statistics against the model's counts."""
        self.core.check()
        self._check_statistics()
        self._check_mappings()
        self.check_contents()
        if self.options.zero_policy is not ZeroPolicy.NEVER:
            self.check_isolation()

    def _check_statistics(self) -> None:
        stats, model = self.see_copies(), self.model
        null = int(self.options.shape.null_page)
        refs = model.seen.refs
        assert stats.num_seqs == len(model.seqs)
        assert stats.swapped_seqs == sum(m.swapped for m in model.seqs.values())
        assert stats.used_pages - len(model.used_pages()) in (0, null)
        assert stats.used_blocks - len(refs) in (0, null * self.options.shape.blocks_per_page)
        assert stats.shared_blocks == sum(count > 1 for count in refs.values())
        assert stats.used_slots == sum(s.slot is not None for s in model.seen.seqs.values())
        known = stats.free_pages + stats.used_pages + stats.waiting_pages
        known += stats.idle_pages + stats.held_pages
        assert stats.committed_pages - known in (0, null)
        assert stats.waiting_pages == 0 or model.completed < model.begun or model.copied
        assert stats.committed_pages <= self.options.shape.max_pages

    def _check_mappings(self) -> None:
        """What an incomplete epoch may read stays mapped, though its sequence may be gone; and
        there are as many mappings as the ledger says."""
        stats = self.core.stats()
        if stats.pending_repairs == 0:
            assert stats.num_mappings == self.count_mappings()
        for page in self.model.waiting_pages():
            for group in range(GROUPS):
                address = self.core.arena_buffer(group)[page].ctypes.data
                assert self.is_mapped(address), f"page {page} waits, but the arena lost it"

    def drain(self) -> None:
        """Ends everything that was begun and releases every sequence."""
        for seq in list(self.model.seqs):
            self.release(seq)
        self.complete(self.model.begun)
        self.core.settle_mapper()
        self.finish_copies()
        assert not self.model.copied
        self.quiet()

    def give_everything_back(self) -> None:
        self.drain()
        self.trim(0, drop_idle=True)
        self.core.check()
        stats = self.core.stats()
        null = int(self.options.shape.null_page)
        assert stats.used_pages in (0, null)
        assert stats.committed_pages == null
        assert stats.memfd_allocated_bytes == null * GROUPS * PAGE
