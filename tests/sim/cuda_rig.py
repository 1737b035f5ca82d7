"""A memory core on the simulated CUDA device, where kernels run late.

Every epoch's kernels, one a sequence, are queued some time after ``apply()``, run some time after
that, and look at what they touch when they run: the simulator reports an access to what is not
mapped (any more), is read-only or shows other memory, and every byte that is not the sequence's.

The books are the models of ``tests/memory``: their laws are held against what can be seen after
every call, and they say which value belongs at each position.

Copies are queued by ``apply()`` itself. So the epochs that are begun and not launched are launched
before an ``apply()`` that may copy what they write. Kernels run on one stream, copies to and from
the host on another, and either may be far behind the other.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tests.memory.model import Oracle
from tests.memory.model_types import VALUES_PER_TENANT, Kind, Observation, Op, Shape
from tests.memory.rig import Books, Fault, Layers, as_tuple, as_view, observe
from tests.sim.simcuda import GRANULE, NOTHING, SPAN, SimConfig, SimCuda
from vmserve import _core
from vmserve._core import Health, MapperMode, ZeroPolicy
from vmserve.errors import DriverError, OutOfMemoryError

ERRORS = (*(1, 2, 999) * 20, 700)
"""CUresults: invalid value, out of memory, unknown; and, seldom, a sticky one: illegal address."""
ONE_KIND = (Layers(),)
SEVERAL = (Layers(0, 1), Layers(6, 2), Layers(11, 1))


@dataclass(frozen=True)
class Setting:
    """What a seed stands for. Twelve seeds in a row have every combination of page width, mapper
    and failures."""

    seed: int
    kinds: tuple[Layers, ...]
    faults: bool
    shape: Shape
    limit_pages: int
    core: dict[str, Any]
    machine: SimConfig

    @property
    def token_bytes(self) -> int:
        return GRANULE // self.shape.page_tokens


def setting(seed: int, kinds: tuple[Layers, ...] = ONE_KIND) -> Setting:
    rng = random.Random(seed)
    blocks_per_page = (1, 4)[seed % 2]
    block_tokens = rng.choice([2, 4])
    page_tokens = block_tokens * blocks_per_page
    max_pages = 24
    shape = Shape(
        block_tokens=block_tokens,
        blocks_per_page=blocks_per_page,
        max_seqs=6,
        num_slots=rng.randint(2, 6),
        max_len=(6 if blocks_per_page == 1 else 3) * page_tokens + rng.randint(-1, 1),
        max_pages=max_pages,
        null_page=rng.random() < 0.5,
        prefix_caching=rng.random() < 0.85,
        swap_blocks=rng.choice([0, 16, 200]),
        read_slack=rng.choice([0, 0, 3]),
        copies_late=True,
    )
    core = {
        "grow_pages": rng.randint(1, 4),
        "zero_policy": rng.choice([ZeroPolicy.TENANT, ZeroPolicy.TENANT, ZeroPolicy.ALWAYS]),
        "deferred_reclamation": rng.random() < 0.8,
        "seal_read_only": rng.random() < 0.7,
        "access_under_readers": seed // 12 % 2 == 0,
        "mapper": (MapperMode.OFF, MapperMode.MANUAL, MapperMode.THREAD)[seed // 2 % 3],
        "lookahead_tokens": rng.choice([0, page_tokens, 2 * page_tokens]),
        "eager_slots": rng.choice([0, 0, 1, 2]),
        "eager_pages": rng.choice([1, 2]),
        "reclaim_share": rng.choice([0.1, 0.1, 0.5]),
    }
    limit = rng.choice([6, 10, 16, max_pages])
    # Now and then the device has less than the limit promises.
    groups = sum(layers.groups for layers in kinds)
    frames = groups * (max_pages if rng.random() < 0.8 else rng.randint(4, max_pages))
    machine = SimConfig(
        seed=seed,
        total_bytes=(frames + 1) * GRANULE,
        pump_per_mille=rng.choice([0, 50, 300]),
        read_only=rng.random() < 0.8,
        sticky_violations=False,
    )
    return Setting(seed, kinds, seed // 6 % 2 == 1, shape, limit, core, machine)


@dataclass
class Begun:
    """An epoch that is not launched yet."""

    epoch: int
    kernels: list[tuple[str, NDArray[Any]]]
    writes: list[tuple[int, int, int]]


@dataclass
class CudaRig(Books):
    setting: Setting
    rng: random.Random
    #: A life that had this directory before, and whose blocks are found.
    before: CudaRig | None = None
    #: Where blocks outlive the life.
    directory: Path | None = None
    sim: SimCuda = field(init=False)
    core: Any = field(init=False)
    oracle: Oracle = field(init=False)
    #: Of each open sequence, int16 ``[groups, max_len]``; 0: nobody knows.
    values: dict[int, NDArray[np.int16]] = field(default_factory=dict)
    #: Sequences that may share a block.
    sharing: set[int] = field(default_factory=set)
    begun: deque[Begun] = field(default_factory=deque)
    #: Calls that failed.
    num_raised: int = 0
    #: The device is lost.
    is_over: bool = False
    #: Epochs and copies end whenever the device lets them.
    is_exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        setting, shape = self.setting, self.setting.shape
        self.sim = SimCuda(setting.machine)
        kinds, shapes = [], []
        total = sum(layers.groups for layers in setting.kinds)
        for layers in setting.kinds:
            most = shape.max_pages * total // layers.groups
            driver = _core.CudaDriver(
                GRANULE, layers.groups * most, library=str(self.sim.path), spare_bytes=0
            )
            own = {"num_groups": layers.groups, "window": layers.window, "max_pages": most}
            kinds.append(own | {"driver": driver, "token_bytes": setting.token_bytes})
            shapes.append(replace(shape, window=layers.window, max_pages=most))
        names = ("block_tokens", "blocks_per_page", "max_seqs", "num_slots", "max_len")
        names += ("null_page", "prefix_caching", "swap_blocks", "read_slack")
        common = {name: getattr(shape, name) for name in names} | setting.core
        self.core = _core.KVMemory(kinds, setting.limit_pages, **common)
        self.oracle = Oracle(shapes, setting.limit_pages)
        if self.directory is not None:
            folders = [self.directory / str(kind) for kind in range(len(kinds))]
            for folder in folders:
                folder.mkdir(exist_ok=True)
            store = _core.StoreDirectory(str(self.directory), 64 * total * GRANULE)
            stores = [store.space(folder.name, bytes(32)) for folder in folders]
            self.core.persist_to(stores, touch_seconds=0)
        if self.before is not None:
            for model, old in zip(self.oracle.kinds, self.before.oracle.kinds, strict=True):
                model.weights = old.weights
                model.may_match |= old.may_match

    # -- the books

    @property
    def shape(self) -> Shape:
        return self.setting.shape

    @property
    def persists(self) -> bool:
        return self.directory is not None

    def observe(self, seqs: Sequence[int] | None = None) -> list[Observation]:
        """Of `seqs`, or of all."""
        seqs = list(self.model.seqs) if seqs is None else seqs
        return observe(self.core, seqs, self.shape.num_slots, len(self.oracle.kinds))

    def num_copying(self) -> list[int]:
        return [stats.copying_blocks for stats in self.core.kind_stats()]

    def see(
        self, seqs: Sequence[int] | None = None, copied: Sequence[set[int]] = ()
    ) -> list[Observation]:
        """What is seen after a call. The models learn which epochs have ended by now, and which of
        the copies before the call, which began to copy `copied`."""
        after = self.observe(seqs)
        if after[0].completed > self.model.completed:
            for model in self.oracle.kinds:
                model.complete(after[0].completed)
        copying = self.num_copying()
        for kind, model in enumerate(self.oracle.kinds):
            of_before = copying[kind] - (len(copied[kind]) if copied else 0)
            while model.copies and sum(model.copied.values()) > of_before:
                model.copies_ended(1)
        return after

    def look(self) -> None:
        """See all, while nothing happens."""
        after = self.observe()
        if after[0].completed > self.model.completed:
            self.oracle.told("complete", after, after[0].completed)
        else:
            self.oracle.told("quiet", after)

    def check(self) -> None:
        violations = self.sim.violations()
        assert not violations, violations[:5]
        if not self.is_over:
            self.core.check()
            self.look()

    def spans(self, id_: int, old: int) -> NDArray[Any]:
        """Its kernel: writes positions from `old` on, reads those before and behind."""
        groups = [
            (kind, group)
            for kind, layers in enumerate(self.setting.kinds)
            for group in range(layers.groups)
        ]
        parts = [self.spans_of(id_, old, *which, row) for row, which in enumerate(groups)]
        return np.concatenate(parts)

    def spans_of(self, id_: int, old: int, kind: int, group: int, row: int) -> NDArray[Any]:
        shape, seq = self.shape, self.oracle.kinds[kind].seqs[id_]
        width, token_bytes = shape.block_tokens, self.setting.token_bytes
        slot = self.core.slot(id_)
        unit = width if slot is None else shape.page_tokens
        first = seq.reads[-1][1] if seq.reads and old < seq.length else seq.first
        # Behind the last position lies what was not written yet, and is nobody else's.
        behind = seq.length + (0 if slot is None else shape.read_slack)
        stop = -(-behind // unit) * unit
        positions = np.arange(first, stop)
        if len(positions) == 0:
            return np.zeros(0, SPAN)
        values = np.zeros(stop - first, np.int16)
        values[: seq.length - first] = self.values[id_][row, first : seq.length]
        cut = (np.diff(values) != 0) | (positions[1:] % width == 0)
        cut |= (positions[1:] == old) | (positions[1:] == seq.length)
        at = np.concatenate([[0], np.flatnonzero(cut) + 1])
        part = np.zeros(len(at), SPAN)
        if slot is None:
            table = self.core.blocks(id_, kind)[positions[at] // width]
            assert (table >= 0).all(), f"a block is missing: {table}, {seq}"
            places = table.astype(np.int64) * width + positions[at] % width
            base = self.core.arena_buffer(group, kind).ctypes.data
            part["address"] = base + places * token_bytes
        else:
            slots = self.core.slots_buffer(group, kind)
            base = slots.ctypes.data + slot * slots.shape[1]
            part["address"] = base + positions[at] * token_bytes
        part["num_bytes"] = np.diff(np.append(at, len(positions))) * token_bytes
        value = values[at]
        lowest = seq.tenant * VALUES_PER_TENANT + 1
        part["low"] = np.where(value > 0, value, lowest)
        part["high"] = np.where(value > 0, value, lowest + VALUES_PER_TENANT - 1)
        part["zero_too"] = value == 0
        part["writes"] = (positions[at] >= old) & (positions[at] < seq.length)
        return part

    # -- operations of a walk

    def guarded(self, call: Callable[[], Any], fault: Fault | None = None) -> bool:
        """Whether the call succeeded. Memory may be short; the driver refuses only what it is
        made to refuse."""
        if fault is not None:
            self.sim.fail(fault.call, self.rng.choice(ERRORS), forever=fault.forever)
        try:
            call()
        except OutOfMemoryError:
            self.num_raised += 1
            return False
        except DriverError as error:
            if fault is None and not self.setting.faults:
                raise
            self.num_raised += 1
            self.is_over = self.is_over or error.sticky
            return False
        finally:
            self.sim.no_faults()
            if self.core.stats().health is Health.FAILED:
                assert self.setting.faults
                self.is_over = True
        return True

    def chore(self, call: Callable[[], Any], fault: Fault | None = None) -> None:
        """A call that concerns no sequence."""
        done = self.guarded(call, fault)
        if not self.is_over:
            self.oracle.told("quiet" if done else "failed", self.see())

    def open(
        self,
        tenant: int,
        *,
        paged: bool,
        salt: bytes = b"",
        stream: Sequence[int],
        known: int,
        private: bool,
    ) -> int | None:
        tokens = [] if private else stream[:known]
        seq: int | None = self.core.open(tenant, as_view(paged), salt, tokens)
        after = self.see([*self.model.seqs, *([] if seq is None else [seq])])
        about = {"tenant": tenant, "paged": paged, "salt": salt, "private": private}
        self.oracle.open(seq, list(stream), known=len(tokens), **about)
        if seq is not None:
            self.oracle.told("opened", after)
            self.sharing.discard(seq)
            self.compute(seq)
        return seq

    def compute(self, seq: int) -> None:
        model = self.model.seqs[seq]
        groups = range(sum(layers.groups for layers in self.setting.kinds))
        self.values[seq] = np.array([model.values(group) for group in groups], np.int16)

    def restore(self, seq: int, ops: Sequence[Op], fault: Fault | None) -> None:
        if self.directory is None:
            return
        attaching = [as_tuple(op) for op in ops if op.kind is Kind.ATTACH]
        self.chore(lambda: self.core.restore(seq, attaching), fault)
        if self.rng.random() < 0.5 and not self.is_over:
            self.chore(self.core.finish_restores)

    def match(self, seq: int) -> int:
        self.look()
        before = self.model.completed
        matched = int(self.core.match(seq))
        self.see()
        if self.model.completed == before:  # else more may be published by now
            self.oracle.check_match(seq, matched, has_state=False)
        return matched

    def may_copy(self, op: Op) -> bool:
        """Something that an epoch which is not launched yet may still write."""
        if op.kind in (Kind.FORK, Kind.CONVERT, Kind.SWAP_OUT):
            return True
        return op.kind is Kind.GROW and self.model.seqs[op.seq].paged and op.seq in self.sharing

    def step(
        self,
        ops: Sequence[Op],
        fault: Fault | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> bool:
        if self.begun and any(self.may_copy(op) for op in ops):
            self.launch(len(self.begun))
        told = [as_tuple(op) for op in ops]
        plan = self.core.plan(told)
        assert plan.lost_prefixes == 0  # a restore spares what starts beside it
        if not plan.fits:
            if plan.waiting_pages:
                self.launch(len(self.begun))
                self.sim.pump()
            return False
        self.look()
        self.see()
        # An epoch that has ended since may have given up what a window does not show any more.
        plan = self.core.plan(told)
        if not plan.fits:
            return False
        if meanwhile is not None:
            meanwhile()
        own = [model.copied_out(ops) for model in self.oracle.kinds]
        copied = [
            model.copied.keys() | blocks
            for model, blocks in zip(self.oracle.kinds, own, strict=True)
        ]
        epochs: list[int] = []
        if not self.guarded(lambda: epochs.append(self.core.apply(told, plan.version)), fault):
            if not self.is_over:
                self.oracle.told("failed", self.see())
            return False
        if self.is_over:
            return True
        after = self.see(copied=own)
        written = {}
        for kind, copying in enumerate(self.num_copying()):
            model = self.oracle.kinds[kind]
            # A copy that has ended since may have been a reason for another one.
            still = model.copied.keys() | (own[kind] if copying else set())
            model.just_copied = copied[kind] - still
            written = {w.seq: w for w in model.apply(ops, epochs[0], after[kind])}
        for op in ops:
            if op.kind is Kind.FORK:
                self.sharing |= {op.seq, op.other}
                self.compute(op.seq)
                self.values[op.seq][:, : op.num_tokens] = self.values[op.other][:, : op.num_tokens]
            elif op.kind is Kind.ATTACH:
                self.sharing.add(op.seq)
        begun = Begun(epochs[0], [], [(w.seq, w.start, w.stop) for w in written.values()])
        for seq in dict.fromkeys(op.seq for op in ops):
            one = self.model.seqs[seq]
            if not one.swapped and one.length > 0:
                old = written[seq].start if seq in written else one.length
                label = f"kernel of sequence {seq} in epoch {epochs[0]}"
                begun.kernels.append((label, self.spans(seq, old)))
        self.begun.append(begun)
        return True

    def release(self, seq: int, fault: Fault | None = None) -> None:
        assert self.guarded(lambda: self.core.release(seq), fault)
        del self.values[seq]
        if self.is_over:
            for model in self.oracle.kinds:
                del model.seqs[seq]
            return
        after = self.see([other for other in self.model.seqs if other != seq])
        self.oracle.told("release", after, seq)

    # -- epochs

    def launch(self, count: int, fault: Fault | None = None) -> None:
        for _ in range(min(count, len(self.begun))):
            begun = self.begun.popleft()
            for label, spans in begun.kernels:
                self.sim.launch_spans(spans, label)
            marks = self.rng.random() < 0.9
            if not marks or not self.guarded(lambda e=begun.epoch: self.core.launched(e), fault):  # type: ignore[misc]
                self.sim.pump()  # as a caller does that waits for the device itself
                self.core.complete(begun.epoch)

    def abandon(self) -> None:
        """The kernels never reach the device: what they were to write is worth nothing."""
        if not self.begun:
            return
        self.sim.pump()
        self.look()
        for begun in self.begun:
            for seq, start, stop in begun.writes:
                if seq in self.values:
                    self.values[seq][:, start:stop] = 0
        epoch = self.begun[-1].epoch
        self.core.abandon_epoch(epoch)
        self.oracle.told("abandon", self.observe(), epoch)
        self.begun.clear()

    def end_epoch(self, rng: random.Random, fault: Fault | None) -> None:
        if rng.random() < 0.06:
            self.abandon()
        else:
            self.launch(rng.randint(1, 3), fault)

    def let_run(self, rng: random.Random, fault: Fault | None) -> None:
        """The device works on, and epochs reach it."""
        if rng.random() < 0.5:
            self.launch(1, fault)
        if not self.is_over and rng.random() < 0.6:
            self.sim.pump(rng.choice([1, 3, 10, 100]))

    def keep_house(self, chore: str, rng: random.Random, fault: Fault | None) -> None:
        core = self.core
        if chore == "trim":
            keep, drop = rng.randint(0, 4), rng.random() < 0.5
            self.chore(lambda: core.trim(keep, drop), fault)
        elif chore == "set_limit":
            limit = rng.randint(4, self.shape.max_pages)
            for model in self.oracle.kinds:
                model.limit_pages = limit
            self.chore(lambda: core.set_limit(limit), fault)
        elif chore == "compact":
            if rng.random() < 0.5:
                self.launch(len(self.begun))
                self.sim.pump()
                core.stats()
            done = self.guarded(core.compact, fault)
            if not self.is_over:
                self.oracle.told("compact" if done else "failed", self.see())
        elif chore == "clear_cache":
            if rng.random() < 0.3:
                core.clear_cache()
                self.oracle.clear_cache()
        elif chore in ("run_mapper", "run_store"):
            count = rng.randint(1, 3)
            self.chore(lambda: getattr(core, chore)(count), fault)
        elif chore in ("finish_copies", "settle_mapper"):
            self.chore(getattr(core, chore), fault)
        elif chore == "flush":
            self.chore(lambda: core.flush(10), fault)

    def finish(self) -> None:
        """Everything reads back right, then everything comes back."""
        core, null = self.core, int(self.shape.null_page)
        self.launch(len(self.begun))
        if self.is_over:
            return
        self.sim.pump()
        for seq, model in self.model.seqs.items():
            if model.length and not model.swapped:
                label = f"the last kernel of sequence {seq}"
                self.sim.launch_spans(self.spans(seq, model.length), label)
        self.sim.pump()
        self.check()
        if self.directory is not None:
            core.finish_restores()
            assert core.flush(10)
        for seq in list(self.model.seqs):
            core.release(seq)
        core.complete(core.begun_epoch)
        core.settle_mapper()
        core.trim(0, drop_idle=True)
        core.check()
        assert core.stats().health is Health.HEALTHY
        assert all(stats.committed_pages == null for stats in core.kind_stats())
        assert self.sim.counts().handles == null * sum(kind.groups for kind in self.setting.kinds)
        assert self.sim.violations() == []

    def close(self) -> None:
        self.core.close()
        self.core = None
        assert self.is_over or self.sim.counts() == NOTHING
