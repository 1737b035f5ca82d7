"""A random life of the memory core on the simulated CUDA device, where kernels run late.

Every epoch's kernels, one a sequence, are queued some time after ``apply()``, run some time after
that, and look at what they touch when they run: the simulator reports an access to what is not
mapped (any more), is read-only or shows other memory, and every byte that is not the sequence's.

The books are the model's of ``tests/memory``: its laws are held against what can be seen after
every call, and it says which value belongs at each position.

Copies are queued by ``apply()`` itself. So the epochs that are begun and not launched are launched
before an ``apply()`` that may copy what they write. Kernels run on one stream, copies to and from
the host on another, and either may be far behind the other.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.memory.core_support import as_tuple, as_view, observe
from tests.memory.model import Model
from tests.memory.model_types import VALUES_PER_TENANT, Kind, Observation, Op, Shape
from tests.sim.simcuda import GRANULE, NOTHING, SPAN, SimConfig, SimCuda
from vmserve import _core
from vmserve._core import Health, MapperMode, ZeroPolicy
from vmserve.errors import DriverError, OutOfMemoryError

GROUPS = 2
MAX_SEQS = 6
ERRORS = (*(1, 2, 999) * 20, 700)
"""CUresults: invalid value, out of memory, unknown; and, seldom, a sticky one: illegal address."""


@dataclass(frozen=True)
class Setting:
    """What a seed stands for. Twelve seeds in a row have every combination of page width, mapper
    and failures."""

    seed: int
    blocks_per_page: int
    mapper: MapperMode
    faults: bool
    block_tokens: int
    max_pages: int
    core: dict[str, Any]
    machine: SimConfig

    @property
    def page_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_page

    @property
    def token_bytes(self) -> int:
        return GRANULE // self.page_tokens

    def shape(self) -> Shape:
        names = ("block_tokens", "blocks_per_page", "max_seqs", "num_slots", "max_len")
        names += ("max_pages", "null_page", "prefix_caching", "swap_blocks", "read_slack")
        return Shape(**{name: self.core[name] for name in names}, copies_late=True)


def setting(seed: int) -> Setting:
    rng = random.Random(seed)
    blocks_per_page = (1, 4)[seed % 2]
    mapper = (MapperMode.OFF, MapperMode.MANUAL, MapperMode.THREAD)[seed // 2 % 3]
    block_tokens = rng.choice([2, 4])
    page_tokens = block_tokens * blocks_per_page
    max_pages = 24
    null_page = rng.random() < 0.5
    limit = rng.choice([6, 10, 16, max_pages])
    core = {
        "num_groups": GROUPS,
        "block_tokens": block_tokens,
        "blocks_per_page": blocks_per_page,
        "token_bytes": GRANULE // page_tokens,
        "max_seqs": MAX_SEQS,
        "num_slots": rng.randint(2, 6),
        "max_len": (6 if blocks_per_page == 1 else 3) * page_tokens + rng.randint(-1, 1),
        "read_slack": rng.choice([0, 0, 3]),
        "limit_pages": limit,
        "max_pages": max_pages,
        "grow_pages": rng.randint(1, 4),
        "zero_policy": rng.choice([ZeroPolicy.TENANT, ZeroPolicy.TENANT, ZeroPolicy.ALWAYS]),
        "prefix_caching": rng.random() < 0.85,
        "null_page": null_page,
        "deferred_reclamation": rng.random() < 0.8,
        "seal_read_only": rng.random() < 0.7,
        "access_under_readers": seed // 12 % 2 == 0,
        "swap_blocks": rng.choice([0, 16, 200]),
        "mapper": mapper,
        "lookahead_tokens": rng.choice([0, page_tokens, 2 * page_tokens]),
        "eager_slots": rng.choice([0, 0, 1, 2]),
        "eager_pages": rng.choice([1, 2]),
        "reclaim_share": rng.choice([0.1, 0.1, 0.5]),
    }
    # Now and then the device has less than the limit promises.
    frames = GROUPS * (max_pages if rng.random() < 0.8 else rng.randint(4, max_pages))
    machine = SimConfig(
        seed=seed,
        total_bytes=(frames + 1) * GRANULE,
        pump_per_mille=rng.choice([0, 50, 300]),
        read_only=rng.random() < 0.8,
        sticky_violations=False,
    )
    faults = seed // 6 % 2 == 1
    return Setting(seed, blocks_per_page, mapper, faults, block_tokens, max_pages, core, machine)


@dataclass
class Begun:
    """An epoch that is not launched yet."""

    epoch: int
    kernels: list[tuple[str, NDArray[Any]]]
    writes: list[tuple[int, int, int]]


@dataclass
class Life:
    setting: Setting
    #: A life that had this directory before, and whose blocks are found.
    before: Life | None = None
    #: Where blocks outlive the life.
    directory: Path | None = None
    rng: random.Random = field(init=False)
    sim: SimCuda = field(init=False)
    core: Any = field(init=False)
    model: Model = field(init=False)
    #: Of each open sequence, int16 ``[groups, max_len]``; 0: nobody knows.
    values: dict[int, NDArray[np.int16]] = field(default_factory=dict)
    #: Sequences that may share a block.
    sharing: set[int] = field(default_factory=set)
    begun: deque[Begun] = field(default_factory=deque)
    num_steps: int = 0
    num_raised: int = 0
    lost: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(self.setting.seed ^ (0x5EED if self.before is None else 0xE11A))
        self.sim = SimCuda(self.setting.machine)
        frames = GROUPS * self.setting.max_pages
        driver = _core.CudaDriver(GRANULE, frames, library=str(self.sim.path), spare_bytes=0)
        self.core = _core.KVMemory([{"driver": driver}], **self.setting.core)
        core, groups = self.core, range(GROUPS)
        self.arenas = [core.arena_buffer(group).ctypes.data for group in groups]
        self.slots = [core.slots_buffer(group).ctypes.data for group in groups]
        self.slot_bytes = core.slots_buffer(0).shape[1]
        self.model = Model(self.setting.shape(), self.setting.core["limit_pages"])
        self.max_len: int = self.setting.core["max_len"]
        if self.directory is not None:
            (self.directory / "s").mkdir(exist_ok=True)
            store = _core.StoreDirectory(str(self.directory), 64 * GROUPS * GRANULE)
            self.core.persist_to([store.space("s", bytes(32))], touch_seconds=0)
        if self.before is not None:
            self.model.weights = self.before.model.weights
            self.model.may_match |= self.before.model.may_match

    # -- the books

    def observe(self, seqs: Sequence[int] | None = None) -> Observation:
        """Of `seqs`, or of all."""
        seqs = list(self.model.seqs) if seqs is None else seqs
        return observe(self.core, seqs, self.setting.core["num_slots"])

    def see(self, seqs: Sequence[int] | None = None, num_copied: int = 0) -> Observation:
        """What is seen after a call. The model learns which epochs have ended by now, and which of
        the copies before the call, which began `num_copied`."""
        after = self.observe(seqs)
        if after.completed > self.model.completed:
            self.model.complete(after.completed)
        copying = self.core.stats().copying_blocks - num_copied
        while self.model.copies and sum(self.model.copied.values()) > copying:
            self.model.copies_ended(1)
        return after

    def look(self) -> None:
        """See all, while nothing happens."""
        after = self.observe()
        if after.completed > self.model.completed:
            self.model.complete(after.completed, after)
        else:
            self.model.quiet(after)

    def has_unknown_tokens(self, seq: int) -> bool:
        """Whether any tokens may be computed: the memory is told none, or none any more."""
        model = self.model.seqs[seq]
        return model.known == 0 or model.tokens_unknown or model.weights != self.model.weights

    def compute(self, seq: int) -> None:
        model = self.model.seqs[seq]
        self.values[seq] = np.array([model.values(group) for group in range(GROUPS)], np.int16)

    def spans(self, id_: int, old: int) -> NDArray[Any]:
        """Its kernel: writes positions from `old` on, reads those before and behind."""
        setting, seq = self.setting, self.model.seqs[id_]
        width, token_bytes = setting.block_tokens, setting.token_bytes
        slot = self.core.slot(id_)
        blocks = self.core.blocks(id_)
        unit = width if slot is None else setting.page_tokens
        # Behind the last position lies what was not written yet, and is nobody else's.
        behind = seq.length + (0 if slot is None else setting.core["read_slack"])
        stop = -(-behind // unit) * unit
        positions = np.arange(seq.first, stop)
        if len(positions) == 0:
            return np.zeros(0, SPAN)
        parts = []
        for group in range(GROUPS):
            values = np.zeros(stop - seq.first, np.int16)
            values[: seq.length - seq.first] = self.values[id_][group, seq.first : seq.length]
            cut = (np.diff(values) != 0) | (positions[1:] % width == 0)
            cut |= (positions[1:] == old) | (positions[1:] == seq.length)
            at = np.concatenate([[0], np.flatnonzero(cut) + 1])
            part = np.zeros(len(at), SPAN)
            if slot is None:
                table = blocks[positions[at] // width]
                assert (table >= 0).all(), f"a block is missing: {table}, {seq}"
                places = table.astype(np.int64) * width + positions[at] % width
                part["address"] = self.arenas[group] + places * token_bytes
            else:
                base = self.slots[group] + slot * self.slot_bytes
                part["address"] = base + positions[at] * token_bytes
            part["num_bytes"] = np.diff(np.append(at, len(positions))) * token_bytes
            value = values[at]
            lowest = seq.tenant * VALUES_PER_TENANT + 1
            part["low"] = np.where(value > 0, value, lowest)
            part["high"] = np.where(value > 0, value, lowest + VALUES_PER_TENANT - 1)
            part["zero_too"] = value == 0
            part["writes"] = (positions[at] >= old) & (positions[at] < seq.length)
            parts.append(part)
        return np.concatenate(parts)

    # -- steps

    def run(self, num_steps: int) -> None:
        while self.num_steps < num_steps and not self.lost:
            self.step()
        if not self.lost:
            self.finish()

    def step(self) -> None:
        self.num_steps += 1
        rng = self.rng
        draw = rng.random()
        if draw < 0.12:
            self.admit()
        elif draw < 0.52:
            self.decode()
        elif draw < 0.60:
            self.make_way()
        elif draw < 0.70:
            self.mix()
        elif draw < 0.75:
            self.fork()
        elif draw < 0.82 and self.model.seqs:
            self.release(rng.choice(list(self.model.seqs)))
        elif draw < 0.90:
            self.keep_house()
        elif draw < 0.98:
            self.launch(rng.randint(1, 3))
        elif draw < 0.985:
            self.abandon()
        if rng.random() < 0.5:
            self.launch(1)
        if rng.random() < 0.6:
            self.sim.pump(rng.choice([1, 3, 10, 100]))
        self.check()

    def check(self) -> None:
        violations = self.sim.violations()
        assert not violations, violations[:5]
        if not self.lost:
            self.core.check()
            self.look()

    def guarded(self, call: Callable[[], Any]) -> bool:
        """Whether the call succeeded. Memory may be short; the driver refuses only what it is
        made to refuse."""
        fails = self.setting.faults and self.rng.random() < 0.25
        if fails:
            once = self.rng.random() < 0.7
            self.sim.fail(self.rng.randint(1, 24), self.rng.choice(ERRORS), forever=not once)
        try:
            call()
        except OutOfMemoryError:
            self.num_raised += 1
            return False
        except DriverError as error:
            if not self.setting.faults:
                raise
            self.num_raised += 1
            self.lost = self.lost or error.sticky
            return False
        finally:
            self.sim.no_faults()
            if self.core.stats().health is Health.FAILED:
                assert self.setting.faults
                self.lost = True
        return True

    def chore(self, call: Callable[[], Any]) -> None:
        """A call that concerns no sequence."""
        if self.guarded(call):
            self.model.quiet(self.see())
        elif not self.lost:
            self.model.failed(self.see())

    def open(self, tenant: int, *, paged: bool, tokens_unknown: bool) -> int | None:
        rng = self.rng
        ones = rng.choice([1, self.max_len // 4, self.max_len // 2, self.max_len])
        stream = [1] * ones + [2] * (self.max_len - ones)  # prefixes collide
        salt = rng.choice(["", "", "", "salt"])
        known = 0 if tokens_unknown else rng.randint(1, self.max_len)
        seq: int | None = self.core.open(tenant, as_view(paged), salt.encode(), stream[:known])
        after = self.see([*self.model.seqs, *([] if seq is None else [seq])])
        self.model.open(
            seq,
            tenant=tenant,
            paged=paged,
            salt=salt,
            stream=stream,
            known=known,
            private=tokens_unknown,
        )
        if seq is not None:
            self.model.opened(after)
            self.sharing.discard(seq)
            self.compute(seq)
        return seq

    def match(self, seq: int) -> int:
        self.look()
        before = self.model.completed
        matched = int(self.core.match(seq))
        self.see()
        if self.model.completed == before:  # else more may be published by now
            self.model.check_match(seq, matched)
        return matched

    def growth(self, seq: int, length: int, *, most: int | None = None) -> list[Op]:
        model = self.model.seqs[seq]
        top = self.max_len if self.has_unknown_tokens(seq) else min(self.max_len, model.known + 1)
        top = top if most is None else min(top, most)
        to = self.rng.randint(length, top) if top > length else length
        slides = length > 0 and self.rng.random() < 0.08
        first = self.rng.randint(model.first, length) if slides else 0
        return [Op(Kind.GROW, seq, max(to, 1), first)]

    def admit(self) -> None:
        rng = self.rng
        ops: list[Op] = []
        opened = []
        for _ in range(rng.randint(1, 2)):
            tokens_unknown = rng.random() < 0.1
            seq = self.open(
                rng.choice([0, 0, 1, 2]), paged=rng.random() < 0.5, tokens_unknown=tokens_unknown
            )
            if seq is None:
                continue
            opened.append(seq)
            if self.directory is not None and rng.random() < 0.8:
                attaching = [as_tuple(op) for op in ops if op.kind is Kind.ATTACH]
                self.chore(partial(self.core.restore, seq, attaching))
                if rng.random() < 0.5 and not self.lost:
                    self.chore(self.core.finish_restores)
            if self.lost:
                return
            matched = self.match(seq)
            if matched > 0 and rng.random() < 0.9:
                ops.append(Op(Kind.ATTACH, seq, matched))
            else:
                matched = 0
            ops += self.growth(seq, matched)
        if ops and not self.apply(ops):
            for seq in opened:
                self.release(seq)

    def decode(self) -> None:
        """A token or a few for most sequences: what an engine does nearly always."""
        rng = self.rng
        ops: list[Op] = []
        for seq, model in self.model.seqs.items():
            if model.length == 0 or model.swapped or rng.random() < 0.2:
                continue
            if not self.has_unknown_tokens(seq) and model.known <= min(
                model.length, self.max_len - 1
            ):
                self.core.append_tokens([seq], [self.model.append_token(seq)])
            ops += self.growth(seq, model.length, most=model.length + rng.choice([1, 1, 1, 5]))
        if ops:
            self.apply(ops)

    def mix(self) -> None:
        """Conversions and swaps among growths."""
        rng = self.rng
        ops: list[Op] = []
        for seq in rng.sample(list(self.model.seqs), min(len(self.model.seqs), 3)):
            model = self.model.seqs[seq]
            if model.length == 0:
                continue
            if model.swapped:
                ops.append(Op(Kind.SWAP_IN, seq))
            elif rng.random() < 0.5:
                ops.append(Op(Kind.CONVERT, seq, paged=rng.choice([True, False])))
            else:
                ops.append(Op(Kind.SWAP_OUT, seq))
                continue
            if rng.random() < 0.5:
                ops += self.growth(seq, model.length)
        if ops:
            self.apply(ops)

    def present(self) -> list[int]:
        return [seq for seq, model in self.model.seqs.items() if model.length and not model.swapped]

    def make_way(self) -> None:
        """Somebody's pages are wanted at once, while the copies of them run; or it comes back."""
        rng, present = self.rng, self.present()
        victims = rng.sample(present, min(len(present), rng.choice([1, 1, 2])))
        if not victims or not self.apply([Op(Kind.SWAP_OUT, seq) for seq in victims]):
            return
        for _ in range(rng.randint(1, 3)):
            if self.lost:
                return
            rng.choice([self.decode, self.decode, self.admit, self.fork])()
            self.launch(rng.randint(0, 2))
            if rng.random() < 0.3:
                self.sim.pump(1)
        back = rng.choice(victims)
        if rng.random() < 0.5 and not self.lost:
            model = self.model.seqs.get(back)
            if model is not None and model.swapped:
                self.apply([Op(Kind.SWAP_IN, back)])

    def fork(self) -> None:
        rng = self.rng
        parents = [seq for seq in self.present() if self.model.seqs[seq].first == 0]
        if not parents:
            return
        parent = rng.choice(parents)
        child = self.open(
            self.model.seqs[parent].tenant, paged=rng.random() < 0.5, tokens_unknown=False
        )
        if child is None:
            return
        end = rng.randint(1, self.model.seqs[parent].length)
        ops = [Op(Kind.FORK, child, end, other=parent)]
        if rng.random() < 0.6:
            ops.append(Op(Kind.GROW, child, min(end + 1, self.max_len)))
        self.sharing |= {parent, child}
        if not self.apply(ops):
            self.release(child)

    def may_copy(self, op: Op) -> bool:
        """Something that an epoch which is not launched yet may still write."""
        if op.kind in (Kind.FORK, Kind.CONVERT, Kind.SWAP_OUT):
            return True
        return op.kind is Kind.GROW and self.model.seqs[op.seq].paged and op.seq in self.sharing

    def apply(self, ops: Sequence[Op]) -> bool:
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
        copied = self.model.copied.keys() | self.model.copied_out(ops)
        epochs: list[int] = []
        if not self.guarded(lambda: epochs.append(self.core.apply(told, plan.version))):
            if not self.lost:
                self.model.failed(self.see())
            return False
        if self.lost:
            return True
        own = self.model.copied_out(ops)
        after = self.see(num_copied=len(own))
        # A copy that has ended since may have been a reason for another one.
        still = self.model.copied.keys() | (own if self.core.stats().copying_blocks else set())
        self.model.just_copied = copied - still
        written = {w.seq: w for w in self.model.apply(ops, epochs[0], after)}
        for op in ops:
            if op.kind is Kind.FORK:
                self.compute(op.seq)
                self.values[op.seq][:, : op.num_tokens] = self.values[op.other][:, : op.num_tokens]
            elif op.kind is Kind.ATTACH:
                self.sharing.add(op.seq)
        begun = Begun(epochs[0], [], [(w.seq, w.start, w.stop) for w in written.values()])
        for seq in dict.fromkeys(op.seq for op in ops):
            model = self.model.seqs[seq]
            if not model.swapped and model.length > 0:
                old = written[seq].start if seq in written else model.length
                label = f"kernel of sequence {seq} in epoch {epochs[0]}, step {self.num_steps},"
                begun.kernels.append((label, self.spans(seq, old)))
        self.begun.append(begun)
        return True

    # -- epochs

    def launch(self, count: int) -> None:
        for _ in range(min(count, len(self.begun))):
            begun = self.begun.popleft()
            for label, spans in begun.kernels:
                self.sim.launch_spans(spans, label)
            marks = self.rng.random() < 0.9
            if not marks or not self.guarded(lambda e=begun.epoch: self.core.launched(e)):  # type: ignore[misc]
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
        self.model.abandon(epoch, self.observe())
        self.begun.clear()

    # -- the rest

    def release(self, seq: int) -> None:
        assert self.guarded(lambda: self.core.release(seq))
        del self.values[seq]
        if self.lost:
            del self.model.seqs[seq]
            return
        after = self.see([other for other in self.model.seqs if other != seq])
        self.model.release(seq, lambda: after)

    def keep_house(self) -> None:
        rng, core = self.rng, self.core
        chores = ["trim", "trim", "limit", "compact", "compact", "cache", "mapper", "settle"]
        chores += ["copies"] if self.directory is None else ["store", "store", "flush"]
        chore = rng.choice(chores)
        if chore == "trim":
            keep, drop = rng.randint(0, 4), rng.random() < 0.5
            self.chore(lambda: core.trim(keep, drop))
        elif chore == "limit":
            limit = rng.randint(4, self.setting.max_pages)
            self.model.limit_pages = limit
            self.chore(lambda: core.set_limit(limit))
        elif chore == "compact":
            if rng.random() < 0.5:
                self.launch(len(self.begun))
                self.sim.pump()
                core.stats()
            if self.guarded(core.compact):
                self.model.compact(self.see())
            elif not self.lost:
                self.model.failed(self.see())
        elif chore == "cache":
            if rng.random() < 0.3:
                core.clear_cache()
                self.model.clear_cache()
        elif chore == "mapper":
            count = rng.randint(1, 3)
            self.chore(lambda: core.run_mapper(count))
        elif chore == "copies":
            self.chore(core.finish_copies)
        elif chore == "store":
            jobs = rng.randint(1, 3)
            self.chore(lambda: core.run_store(jobs))
        elif chore == "flush":
            self.chore(lambda: core.flush(10))
        else:
            self.chore(core.settle_mapper)

    def finish(self) -> None:
        """Everything reads back right, then everything comes back."""
        core, null = self.core, int(self.setting.core["null_page"])
        self.launch(len(self.begun))
        if self.lost:
            return
        self.sim.pump()
        for seq in self.present():
            label = f"the last kernel of sequence {seq}"
            self.sim.launch_spans(self.spans(seq, self.model.seqs[seq].length), label)
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
        stats = core.stats()
        assert stats.health is Health.HEALTHY
        assert stats.committed_pages == null
        assert self.sim.counts().handles == null * GROUPS
        assert self.sim.violations() == []

    def close(self) -> None:
        self.core.close()
        self.core = None
        assert self.lost or self.sim.counts() == NOTHING
