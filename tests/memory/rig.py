"""The memory core and its model side by side: every call is checked, every byte read back.

Small shapes: 2 groups, pages of one granule (4 KiB), so that a token has 4096 / page_tokens bytes.
"""

from __future__ import annotations

import math
import random
import shutil
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tests.memory.groups import everywhere, with_another
from tests.memory.model import Model, Oracle
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
    expect,
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


def observe(
    core: Any, seqs: Sequence[int], num_slots: int, num_kinds: int = 1
) -> list[Observation]:
    """What can be seen of each kind from outside; its block tables must say the same."""
    core.stats()  # finds out what has ended
    return [
        _observe_kind(core, seqs, num_slots, kind, stats)
        for kind, stats in enumerate(core.kind_stats()[:num_kinds])
    ]


def _observe_kind(
    core: Any, seqs: Sequence[int], num_slots: int, kind: int, stats: Any
) -> Observation:
    found = {seq: _see(core, seq, kind) for seq in seqs}
    listed = {b for seen in found.values() for b in seen.blocks if b != NO_BLOCK}
    return Observation(
        seqs=found,
        slots={slot: tuple(map(int, core.slot_pages(slot, kind))) for slot in range(num_slots)},
        refs={block: int(core.block_refs(block, kind)) for block in sorted(listed)},
        begun=core.begun_epoch,
        completed=core.completed_epoch,
        evictions=stats.evicted_blocks_total,
        packings=stats.compactions_total,
    )


def _see(core: Any, seq: int, kind: int) -> Seen:
    swapped = core.swapped(seq)
    blocks = () if swapped else tuple(map(int, core.blocks(seq, kind)))
    row = core.block_tables(kind)[seq]
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
class Layers:
    """A kind of layers: what its tokens see (0: all before them), groups, pages of the host in one
    of its own, which a token has as many more bytes for."""

    window: int = 0
    groups: int = GROUPS
    size: int = 1


@dataclass(frozen=True)
class Options:
    """What a memory is built with; `shape` is what the model knows of it."""

    shape: Shape
    limit_pages: int
    kinds: tuple[Layers, ...] = (Layers(),)
    #: A kind with a state of a page after them, and the tokens between its checkpoints.
    checkpoint_tokens: int = 0
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
    #: Over groups of two drivers, of which these refuse and copy late.
    faulty_member: int | None = None
    #: The device has done a step's work when the driver is told so.
    late_marks: bool = False
    #: Published blocks are kept in files, and read back.
    persists: bool = False
    #: The call that the second kind's driver refuses from the start on; 0: none.
    refused_call: int = 0

    @property
    def whole_pages(self) -> int:
        """Pages of the host in a page of all layers."""
        return sum(kind.groups * kind.size for kind in self.kinds)


@dataclass
class Fault:
    """The call-th call of a kind's driver fails, once or with every later one."""

    call: int
    forever: bool = False
    kind: int = 0


@dataclass
class Part:
    """A kind of layers in the core, the driver behind it and the one that injects faults there."""

    core: Any
    number: int
    layers: Layers
    block_tokens: int
    token_bytes: int
    #: Of its first group among those of all kinds.
    first_group: int
    faults: _core.FaultInjectingDriver
    driver: _core.PageDriver
    #: The driver's marks after what each plan swapped out, while the model has them as copied.
    copy_marks: list[int] = field(default_factory=list)

    @property
    def page_bytes(self) -> int:
        """Of all groups."""
        return self.layers.groups * self.layers.size * PAGE

    @property
    def stats(self) -> Any:
        return self.core.kind_stats()[self.number]

    def arena(self, group: int) -> NDArray[np.uint8]:
        """uint8 ``[blocks, block_tokens, token_bytes]``; only what is mapped may be touched."""
        buffer: NDArray[np.uint8] = self.core.arena_buffer(group, self.number)
        return buffer.reshape(-1, self.block_tokens, self.token_bytes)

    def slot(self, slot: int, group: int) -> NDArray[np.uint8]:
        """uint8 ``[tokens, token_bytes]``; only what is mapped may be touched."""
        row: NDArray[np.uint8] = self.core.slots_buffer(group, self.number)[slot]
        return row.reshape(-1, self.token_bytes)

    def is_mapped(self, address: int) -> bool:
        return self.driver.query(address)[0] >= 0

    def count_mappings(self, slots: Container[int | None] | None = None, *, shadow: bool) -> int:
        """Maximal runs of what is mapped alike, and of what is not, page by page as the driver
        tells; of the slots only `slots`, as if nothing were mapped in the others."""
        count, step = 0, self.layers.size * PAGE
        for group in range(self.layers.groups):
            arena = self.core.arena_buffer(group, self.number)
            rows = self.core.slots_buffer(group, self.number)
            ranges = [(arena, False), (rows, True)]
            if shadow:
                ranges.append((self.core.shadow_buffer(group), True))
            for memory, has_slots in ranges:
                last: tuple[int, object] | None = None
                for offset in range(0, memory.nbytes, step):
                    frame, access = self.driver.query(memory.ctypes.data + offset)
                    slot = offset // rows.strides[0]
                    if has_slots and slots is not None and slot not in slots:
                        frame = -1
                    joins = last is not None and (
                        (frame < 0 and last[0] < 0) or (frame >= 0 and last == (frame - 1, access))
                    )
                    count += not joins
                    last = (frame, access)
        return count


class Books:
    """What every rig knows of its memory through the oracle."""

    core: Any
    oracle: Oracle

    @property
    def model(self) -> Model:
        """Of the first kind: what is the same for all, and of a memory of one kind everything."""
        return self.oracle.kinds[0]

    @property
    def narrowest(self) -> int:
        """What a token sees in every kind."""
        windows = [model.shape.window for model in self.oracle.kinds if model.shape.window]
        return min(windows, default=self.model.shape.max_len)

    def append(self, seqs: Sequence[int]) -> None:
        self.core.append_tokens(list(seqs), [self.oracle.append_token(seq) for seq in seqs])


@dataclass
class Rig(Books):
    options: Options
    core: Any = field(init=False)
    oracle: Oracle = field(init=False)
    #: Of the kinds that keep tokens, and the one with a state.
    parts: list[Part] = field(default_factory=list)
    state: Part | None = None
    values: dict[int, NDArray[np.uint8]] = field(default_factory=dict)  # [groups, max_len]
    #: The directory of stored blocks; one that is not given goes with the rig.
    files: Path | None = None

    def __post_init__(self) -> None:
        options, shape = self.options, self.options.shape
        has_state = options.checkpoint_tokens > 0
        kinds: list[dict[str, Any]] = []
        shapes: list[Shape] = []
        for layers in (*options.kinds, *[Layers(groups=1)] * has_state):
            most = shape.max_pages * options.whole_pages // (layers.groups * layers.size)
            host = _core.HostDriver(
                layers.size * PAGE, layers.groups * most, max_map_count=options.max_map_count
            )
            faults = _core.FaultInjectingDriver(
                host, late_copies=shape.copies_late, late_marks=options.late_marks
            )
            if options.refused_call and len(kinds) == 1:
                faults.arm(options.refused_call)
            driver = with_another(
                faults, options.faulty_member, max_map_count=options.max_map_count
            )
            token_bytes = layers.size * PAGE // shape.page_tokens
            kinds.append(
                {"driver": driver, "window": layers.window, "num_groups": layers.groups}
                | {"max_pages": most, "token_bytes": token_bytes}
            )
            first = sum(part.layers.groups for part in self.parts)
            block_tokens = shape.block_tokens
            if len(self.parts) == len(options.kinds):
                kinds[-1] |= {"state_bytes": PAGE, "checkpoint_tokens": options.checkpoint_tokens}
                kinds[-1] |= {"blocks_per_page": 1, "null_page": False}
                block_tokens, token_bytes = 1, PAGE
            else:
                per_run = layers.groups * (2 if options.shadow else 1)
                bounds = {"max_pages": most, "window": layers.window}
                shapes.append(replace(shape, mappings_per_run=per_run, **bounds))
            own = (len(kinds) - 1, layers, block_tokens, token_bytes, first, faults, driver)
            self.parts.append(Part(None, *own))
        self.core = _core.KVMemory(
            kinds,
            options.limit_pages,
            block_tokens=shape.block_tokens,
            blocks_per_page=shape.blocks_per_page,
            max_seqs=shape.max_seqs,
            num_slots=shape.num_slots,
            max_len=shape.max_len,
            read_slack=shape.read_slack,
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
        for part in self.parts:
            part.core = self.core
        self.state = self.parts.pop() if has_state else None
        self.oracle = Oracle(shapes, options.limit_pages)
        if options.shadow:
            self.core.shadow_buffer(0)
        if options.persists:
            if self.files is None:
                self.files = Path(mkdtemp())
                weakref.finalize(self, shutil.rmtree, self.files)
            names = [str(kind) for kind in range(len(kinds))]
            for name in names:
                (self.files / name).mkdir(exist_ok=True)
            room = 40 * options.whole_pages * PAGE
            directory = _core.StoreDirectory(str(self.files), room)
            self.core.persist_to([directory.space(name, bytes(32)) for name in names])

    #: Everything is known after every call, since nothing runs but what is let run.
    is_exact: ClassVar[bool] = True
    #: Nor can the host's memory be lost.
    is_over: ClassVar[bool] = False

    # -- looking

    @property
    def shape(self) -> Shape:
        return self.options.shape

    @property
    def persists(self) -> bool:
        return self.options.persists

    @property
    def faults(self) -> _core.FaultInjectingDriver:
        return self.parts[0].faults

    @property
    def every_part(self) -> list[Part]:
        return [*self.parts, *([] if self.state is None else [self.state])]

    def observe(self, without: int | None = None) -> list[Observation]:
        seqs = [seq for seq in self.model.seqs if seq != without]
        return observe(self.core, seqs, self.options.shape.num_slots, len(self.parts))

    def told(self, what: str, *values: Any) -> None:
        self.oracle.told(what, self.observe(), *values)

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
        self.oracle.open(
            seq,
            tokens,
            tenant=tenant,
            paged=paged,
            salt=salt,
            known=len(told),
            private=private,
        )
        if seq is not None:
            self.values.pop(seq, None)
            self.told("opened")
        return seq

    def restore(self, seq: int, ops: Sequence[Op] = (), fault: Fault | None = None) -> None:
        """What is stored of the empty sequence's prefix is read, now or when jobs are run; not in
        the place of what `ops` attach."""
        if self.files is not None:
            attaching = [as_tuple(op) for op in ops if op.kind is Kind.ATTACH]
            self.under(fault, lambda: self.core.restore(seq, attaching))
            self.quiet()

    def damage_files(self, number: int) -> None:
        """A bit of a file flips, or a file is lost."""
        files = [] if self.files is None else sorted(self.files.glob("?/*"))
        for file in files[number % 3 :: 3]:
            content = bytearray(file.read_bytes()) or bytearray(1)
            content[number % len(content)] ^= 1 << number % 8
            file.write_bytes(content)
        for file in files[number % 7 :: 7]:
            file.unlink()

    def match(self, seq: int) -> int:
        matched = int(self.core.match(seq))
        self.oracle.check_match(seq, matched, has_state=self.state is not None)
        return matched

    def plan(self, ops: Sequence[Op]) -> Any:
        self.see_copies()
        before = [part.stats for part in self.every_part]
        plan = self.core.plan_step(*as_step(ops))
        self.quiet()
        if len(before) == 1:
            self._check_plan(ops, plan, before[0])
        else:
            self._check_plan_of_kinds(ops, plan, before)
        return plan

    def settled_plan(self, ops: Sequence[Op]) -> Any:
        """A plan may wait for the mapper and give back what is above the limit, or what windows
        have behind. One more changes nothing, to the bit."""
        self.plan(ops)
        self.plan(ops)
        before = self.core.fingerprint()
        plan = self.plan(ops)
        is_busy = self.core.is_copying() or self.core.stats().pending_repairs
        assert is_busy or self.core.fingerprint() == before
        return plan

    def _check_plan(self, ops: Sequence[Op], plan: Any, before: Any) -> None:
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
            held=before.held_pages + before.quarantined_pages,
            free_mappings=math.inf if plan.fits else self.free_mappings(),
        )

    def _check_plan_of_kinds(self, ops: Sequence[Op], plan: Any, before: list[Any]) -> None:
        """In bytes, of which a page of all layers rounds some away."""
        page, shape = self.options.whole_pages * PAGE, self.options.shape
        least, highest = self.model.missing_slots(ops)
        moves = any(op.kind in (Kind.SWAP_OUT, Kind.CONVERT) for op in ops)  # they may make room
        expect(moves or plan.missing_slots >= least, f"{plan.missing_slots} missing, not {least}")
        expect(plan.missing_slots <= highest, f"{plan.missing_slots} missing, not {highest}")
        most = sure = 0
        pairs = zip(self.parts, self.oracle.kinds, before, strict=False)
        for part, model, stats in pairs:
            most += model.most_pages(ops) * part.page_bytes
            kept = len(model.used_pages() | model.waiting_pages() | model.resting.keys())
            kept += shape.null_page + stats.held_pages + stats.quarantined_pages
            sure -= kept * part.page_bytes
        if self.state is not None:
            most += 2 * len(ops) * PAGE
            sure -= before[-1].committed_pages * PAGE
        sure += (self.model.limit_pages - 2) * page
        expect(plan.needed_pages * page <= most + page, f"{plan.needed_pages} pages are needed")
        swaps = any(op.kind is Kind.SWAP_OUT for op in ops) or plan.missing_swap_blocks
        limits = self.options.max_map_count or self.core.stats().pending_repairs
        enough = most <= sure and highest == 0 and not swaps and not limits
        expect(plan.fits or not enough, f"{most} bytes do, {sure} are surely there: no plan")

    def free_mappings(self) -> float:
        """How many can be made, with every slot unmapped that nobody has or reads."""
        if self.core.stats().pending_repairs:
            return 0
        used = {seen.slot for seen in self.model.seen.seqs.values()}
        kept = used | self.model.left_slots.keys()
        part = self.parts[0]
        mapped = part.count_mappings(kept, shadow=self.options.shadow)
        return part.driver.stats().max_mappings - mapped

    def step(
        self,
        ops: Sequence[Op],
        fault: Fault | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> bool:
        """Plans, applies, and writes what the epoch is to write. False: it did not fit, or the
        driver refused; then nothing changed. ``meanwhile``: what happens between the two."""
        plan = self.plan(ops) if meanwhile is None else self.settled_plan(ops)
        if not plan.fits:
            return False
        if meanwhile is not None:
            meanwhile()
            self.quiet()
        lengths = {seq: model.length for seq, model in self.model.seqs.items()}
        before = [model.seen for model in self.oracle.kinds]
        committed = self.committed_bytes()
        late = [self._read_late(part) for part in self.parts]
        contents = [self._contents(*each) for each in zip(self.parts, late, strict=True)]
        rows, others = as_step(ops)
        epoch = self.under(fault, lambda: self.core.apply_step(rows, plan.version, others))
        for part, blocks, had in zip(self.parts, late, contents, strict=True):
            for has, group in zip(self._contents(part, blocks), had, strict=True):
                assert (has == group).all(), f"one of {blocks} changed, which wait"
        if epoch is None:
            return False
        after = self.observe()
        writes, *_ = [
            model.apply(ops, epoch, seen)
            for model, seen in zip(self.oracle.kinds, after, strict=True)
        ]
        for part, model in zip(self.parts, self.oracle.kinds, strict=True):
            if len(model.copies) > len(part.copy_marks):
                part.copy_marks.append(part.faults.copy_mark())
        for op in ops:
            if op.kind is Kind.FORK:
                self.values.pop(op.seq, None)  # it has its parent's contents
        limit = self.model.limit_pages * self.options.whole_pages * PAGE
        assert self.committed_bytes() <= max(committed, limit)
        for op in ops:
            lengths[op.seq] = max(lengths[op.seq], op.num_tokens if op.kind is not Kind.GROW else 0)
        self.check_handed_out(before, {op.seq: lengths[op.seq] for op in ops})
        for write in writes:
            self.write(write)
        return True

    def committed_bytes(self) -> int:
        return sum(part.stats.committed_pages * part.page_bytes for part in self.every_part)

    def _read_late(self, part: Part) -> list[int]:
        """Blocks that nobody has, and which running kernels or copies may still read."""
        model = self.oracle.kinds[part.number]
        return [*(b for b, e in model.waiting.items() if e > model.completed), *model.copied]

    def _contents(self, part: Part, blocks: list[int]) -> list[NDArray[np.uint8]]:
        return [part.arena(group)[blocks] for group in range(part.layers.groups)]

    def under(self, fault: Fault | None, call: Callable[[], Any]) -> Any:
        """The call's result; None if the injected fault made it fail, having changed nothing."""
        if fault is None:
            return call()
        faults = self.every_part[fault.kind % len(self.every_part)].faults
        faults.arm(fault.call, forever=fault.forever)
        try:
            return call()
        except REFUSALS:
            faults.disarm()
            self.told("failed")
            return None
        finally:
            faults.disarm()

    def release(self, seq: int, fault: Fault | None = None) -> None:
        self.under(fault, lambda: self.core.release(seq))
        self.values.pop(seq, None)
        self.oracle.told("release", self.observe(without=seq), seq)

    def keep(self, lengths: dict[int, int]) -> None:
        """Accept drafts; what belongs there is written now, and not by the step that drafted."""
        for seq, length in lengths.items():
            self.write(Write(seq, self.model.begun, self.model.seqs[seq].length, length))
        self.core.keep(list(lengths), list(lengths.values()))
        self.told("keep", lengths)

    def complete(self, epoch: int) -> None:
        self.core.complete(epoch)
        self.told("complete", epoch)

    def abandon(self, epoch: int) -> None:
        self.core.abandon_epoch(epoch)
        self.told("abandon", epoch)

    def launch(self, epoch: int, fault: Fault | None = None) -> None:
        """The host's driver has done its work when it returns, or one kind's after another's when
        they are told so; the next call finds out. Who cannot mark the end waits for it."""
        before = self.core.completed_epoch
        if self.under(fault, lambda: self.core.launched(epoch) or True) is None:
            self.complete(epoch)
            return
        for part in self.every_part:
            if self.options.late_marks:
                self.core.stats()
                assert self.core.completed_epoch == before
                part.faults.reach_marks(1 << 20)
        self.core.stats()
        self.told("complete", epoch)

    def let_run(self, rng: random.Random, fault: Fault | None) -> None:
        """What was begun often ends before anything else happens."""
        if rng.random() < 0.6 and self.model.completed < self.model.begun:
            self.launch(self.model.begun, fault)

    def end_epoch(self, rng: random.Random, fault: Fault | None) -> None:
        """One that runs, in one of its ways."""
        model = self.model
        if model.completed < model.begun:
            epoch = rng.randint(model.completed + 1, model.begun)
            if rng.random() < 0.5:
                self.launch(epoch, fault)
            else:
                rng.choice([self.complete, self.abandon])(epoch)

    def keep_house(self, chore: str, rng: random.Random, fault: Fault | None) -> None:
        """What an engine does between steps, to no sequence."""
        if chore == "trim":
            self.trim(rng.randint(0, 4), drop_idle=rng.random() < 0.5, fault=fault)
        elif chore == "set_limit":  # often below what is in use
            low, high = rng.randint(2, 4), rng.randint(2, self.shape.max_pages)
            self.set_limit(rng.choice([low, high, high, high]), fault)
        elif chore == "compact":
            if rng.random() < 0.5:
                self.complete(self.model.begun)
            self.compact(fault)
        elif chore in ("run_mapper", "run_store"):
            self.under(fault, lambda: getattr(self.core, chore)(rng.randint(1, 3)))
            self.quiet()
        elif chore == "flush":
            self.under(fault, lambda: self.core.flush(10))
            self.quiet()
        elif chore == "damage_files":
            self.damage_files(rng.randint(0, 5000))
        elif chore == "run_copies":
            self.run_copies(rng.randint(1, 3))
        elif chore == "finish_copies":
            self.finish_copies(fault)
        elif chore == "clear_cache":
            self.clear_cache()
        else:
            self.core.settle_mapper()
            self.quiet()

    def clear_cache(self) -> None:
        self.core.clear_cache()
        self.oracle.clear_cache()
        self.quiet()

    def set_limit(self, limit: int, fault: Fault | None = None) -> None:
        for model in self.oracle.kinds:
            model.limit_pages = limit  # it holds even if giving back fails
        self.under(fault, lambda: self.core.set_limit(limit))
        self.quiet()

    def trim(self, keep: int, *, drop_idle: bool, fault: Fault | None = None) -> int | None:
        before = self.core.stats()
        given_back: int | None = self.under(fault, lambda: self.core.trim(keep, drop_idle))
        # A repair that comes to its end first may give back a page of its own.
        is_exact = fault is None and before.pending_repairs == 0 and len(self.every_part) == 1
        if given_back is not None and is_exact:
            assert before.committed_pages - self.core.stats().committed_pages == given_back
        self.quiet()
        return given_back

    def compact(self, fault: Fault | None = None) -> None:
        used = self.see_copies().used_pages
        if (emptied := self.under(fault, self.core.compact)) is None:
            return
        self.told("compact")
        assert self.core.stats().used_pages <= used
        assert emptied >= 0

    def run_copies(self, count: int) -> None:
        """Of what is on its way to host memory, the oldest runs arrive."""
        for part in self.every_part:
            part.faults.run_copies(count)
        self.see_copies()

    def finish_copies(self, fault: Fault | None = None) -> None:
        self.under(fault, self.core.finish_copies)
        self.see_copies()

    def see_copies(self) -> Any:
        """The model learns which copies have ended, from the driver; the core has found out."""
        for part, model in zip(self.parts, self.oracle.kinds, strict=True):
            ended = [mark for mark in part.copy_marks if part.faults.copy_reached(mark)]
            part.copy_marks = part.copy_marks[len(ended) :]
            model.copies_ended(len(ended))
        stats = self.core.stats()
        for part, model in zip(self.parts, self.oracle.kinds, strict=True):
            assert part.stats.copying_blocks >= sum(model.copied.values())
        return stats

    def quiet(self) -> None:
        self.told("quiet")

    # -- contents

    def expected(self, seq: int) -> NDArray[np.uint8]:
        if seq not in self.values:
            model = self.model.seqs[seq]
            groups = range(sum(part.layers.groups for part in self.every_part))
            self.values[seq] = np.array([model.values(group) for group in groups], np.uint8)
        return self.values[seq]

    def write(self, write: Write) -> None:
        """As a kernel of the step does: through the sequence's view, nothing but its positions."""
        positions = np.arange(write.start, write.stop)
        for part in self.parts:
            seen = self.oracle.kinds[part.number].seen.seqs[write.seq]
            for group in range(part.layers.groups):
                values = self.expected(write.seq)[part.first_group + group, positions, None]
                if write.drafted:  # what another answer would have had there
                    values = values[::-1] % VALUES_PER_TENANT + self.first_value(write.seq)
                if seen.slot is not None:
                    for slot in everywhere(part.driver, part.slot(seen.slot, group)):
                        slot[positions] = values
                else:
                    blocks = np.array(seen.blocks)[positions // part.block_tokens]
                    for arena in everywhere(part.driver, part.arena(group)):
                        arena[blocks, positions % part.block_tokens] = values
        if self.state is not None:
            for page in self._state_pages(write.seq):
                page[:] = self.expected(write.seq)[self.state.first_group, write.stop - 1]

    def _state_pages(self, seq: int) -> list[NDArray[np.uint8]]:
        """The sequence's page of states, in each member of a group of drivers."""
        assert self.state is not None
        [block] = self.core.blocks(seq, self.state.number)
        return everywhere(self.state.driver, self.state.arena(0)[int(block)])

    def first_value(self, seq: int) -> int:
        return self.model.seqs[seq].tenant * VALUES_PER_TENANT + 1

    def check_contents(self) -> None:
        """Every sequence reads back what it wrote or took over, in every view that it has."""
        for seq in self.model.seqs:
            model = self.model.seqs[seq]
            if model.swapped or model.length == 0:
                continue
            for part in self.parts:
                self._check_contents_of(seq, part)
            if self.state is not None:
                right = self.expected(seq)[self.state.first_group, model.length - 1]
                assert all((page == right).all() for page in self._state_pages(seq)), seq
        if self.options.shadow and self.core.stats().pending_repairs == 0:
            self._check_shadow()

    def _check_contents_of(self, seq: int, part: Part) -> None:
        oracle = self.oracle.kinds[part.number]
        model, seen = oracle.seqs[seq], oracle.seen.seqs[seq]
        positions = np.arange(model.first, model.length)
        table = np.array(seen.blocks)[positions // part.block_tokens]
        positions, table = positions[table != NO_BLOCK], table[table != NO_BLOCK]
        for group in range(part.layers.groups):
            values = self.expected(seq)[part.first_group + group, positions, None]
            for arena in everywhere(part.driver, part.arena(group)):
                found = arena[table, positions % part.block_tokens]
                assert (found == values).all(), self._difference(seq, "arena", found, values)
            if seen.slot is None:
                continue
            for slot in everywhere(part.driver, part.slot(seen.slot, group)):
                found = slot[positions]
                assert (found == values).all(), self._difference(seq, "slot", found, values)

    def _check_shadow(self) -> None:
        """It shows what the slots show, and zeros where they show nothing."""
        [part] = self.parts
        for group in range(part.layers.groups):
            shadow = self.core.shadow_buffer(group)
            slots = self.core.slots_buffer(group)
            for slot in range(self.options.shape.num_slots):
                for start in range(0, slots.shape[1], PAGE):
                    page, shown = slots[slot, start : start + PAGE], shadow[slot, start:][:PAGE]
                    if part.is_mapped(page.ctypes.data):
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

    def check_handed_out(self, before: Sequence[Observation], lengths: dict[int, int]) -> None:
        """What is new in the tables and not written yet: no other tenant's bytes."""
        shape, policy = self.options.shape, self.options.zero_policy
        if policy is ZeroPolicy.NEVER:
            return
        for part, model, seen in zip(self.parts, self.oracle.kinds, before, strict=True):
            used = {block // shape.blocks_per_page for block in seen.refs}
            for seq, length in lengths.items():
                old = seen.seqs[seq].blocks
                for index, block in enumerate(model.seen.seqs[seq].blocks):
                    if block == NO_BLOCK or block in old:
                        continue
                    fresh = (
                        policy is ZeroPolicy.ALWAYS
                        and index * shape.block_tokens >= length
                        and block // shape.blocks_per_page not in used
                    )
                    allowed = {0} if fresh else set(readable_values(model.seqs[seq].tenant))
                    what = f"block {block}, new to sequence {seq}"
                    self._check_block(part, block, allowed, what)

    def _check_block(self, part: Part, block: int, allowed: Iterable[int], what: str) -> None:
        ok = np.zeros(256, bool)
        ok[list(allowed)] = True
        for group in range(part.layers.groups):
            found = part.arena(group)[block]
            assert ok[found].all(), f"{what}, holds {set(found[~ok[found]].tolist())}"

    def check_isolation(self) -> None:
        """No sequence can read a foreign byte: whole pages in the arena, and all that its slot
        shows, spares included."""
        for part, oracle in zip(self.parts, self.oracle.kinds, strict=True):
            for seq, model in oracle.seqs.items():
                seen, allowed = oracle.seen.seqs[seq], readable_values(model.tenant)
                for block in seen.blocks:
                    if block != NO_BLOCK:
                        what = f"block {block} of sequence {seq}"
                        self._check_block(part, block, allowed, what)
                if seen.slot is not None:
                    self._check_slot(part, seen.slot, allowed)
            if self.options.shape.null_page:
                for block in range(self.options.shape.blocks_per_page):
                    self._check_block(part, block, (0,), "the null page")

    def _check_slot(self, part: Part, slot: int, allowed: Iterable[int]) -> None:
        ok = np.zeros(256, bool)
        ok[list(allowed)] = True
        page_tokens = self.options.shape.page_tokens
        for group in range(part.layers.groups):
            tokens = part.slot(slot, group)
            for index in range(len(tokens) // page_tokens):
                page = tokens[index * page_tokens : (index + 1) * page_tokens]
                if part.is_mapped(page.ctypes.data):
                    assert ok[page].all(), (
                        f"slot {slot} shows {set(page[~ok[page]].tolist())} at page {index}"
                    )

    # -- the books

    def check(self) -> None:
        """The core's own laws, and its statistics against the model's counts."""
        self.core.check()
        stats, model = self.see_copies(), self.model
        assert stats.num_seqs == len(model.seqs)
        assert stats.swapped_seqs == sum(m.swapped for m in model.seqs.values())
        assert stats.used_slots == sum(s.slot is not None for s in model.seen.seqs.values())
        for part in self.parts:
            self._check_statistics(part)
            self._check_mappings(part)
        self.check_contents()
        if self.options.zero_policy is not ZeroPolicy.NEVER:
            self.check_isolation()

    def _check_statistics(self, part: Part) -> None:
        stats, model = part.stats, self.oracle.kinds[part.number]
        null = int(self.options.shape.null_page)
        refs = model.seen.refs
        assert stats.used_pages - len(model.used_pages()) in (0, null)
        assert stats.used_blocks - len(refs) in (0, null * self.options.shape.blocks_per_page)
        assert stats.shared_blocks == sum(count > 1 for count in refs.values())
        known = stats.free_pages + stats.used_pages + stats.waiting_pages
        known += stats.idle_pages + stats.held_pages
        assert stats.committed_pages - known in (0, null)
        assert stats.waiting_pages == 0 or model.completed < model.begun or model.copied
        assert stats.committed_pages <= model.shape.max_pages

    def _check_mappings(self, part: Part) -> None:
        """What an incomplete epoch may read stays mapped, though its sequence may be gone; and
        there are as many mappings as the ledger says."""
        if self.core.stats().pending_repairs == 0:
            mapped = part.count_mappings(shadow=self.options.shadow)
            assert part.stats.num_mappings == mapped
        for page in self.oracle.kinds[part.number].waiting_pages():
            for group in range(part.layers.groups):
                address = self.core.arena_buffer(group, part.number)[page].ctypes.data
                assert part.is_mapped(address), f"page {page} waits, but the arena lost it"

    def drain(self) -> None:
        """Ends everything that was begun and releases every sequence."""
        for seq in list(self.model.seqs):
            self.release(seq)
        self.complete(self.model.begun)
        self.core.settle_mapper()
        self.finish_copies()
        if self.persists:
            self.core.finish_restores()
            assert self.core.flush(10)
        assert not any(model.copied for model in self.oracle.kinds)
        self.quiet()

    def give_everything_back(self) -> None:
        self.drain()
        self.trim(0, drop_idle=True)
        if self.core.stats().pending_repairs:  # what was given back are the mappings that it needs
            self.trim(0, drop_idle=True)
        self.core.check()
        null = int(self.options.shape.null_page)
        for part in self.parts:
            assert part.stats.used_pages in (0, null)
            assert part.stats.committed_pages == null
            assert part.stats.memfd_allocated_bytes == null * part.page_bytes
        assert self.state is None or self.state.stats.committed_pages == 0
