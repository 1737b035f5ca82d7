"""A random life of the memory core on the simulated CUDA device, where kernels run late.

Every epoch's kernels, one a sequence, are queued some time after ``apply()``, run some time after
that, and look at what they touch when they run: the simulator reports an access to what is not
mapped (any more), is read-only or shows other memory, and every byte that is not the sequence's.

Contents. The value at a position depends on the tenant, the salt, the weights, the tokens of the
blocks before it and its own token; each tenant has its own range of values, one byte wide. So what
the prefix cache, forks, conversions and the swap space hand out is right if its bytes are.

Copies are queued by ``apply()`` itself. So the epochs that are begun and not launched are launched
before an ``apply()`` that may copy what they write. Kernels run on one stream, copies to and from
the host on another, and either may be far behind the other.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.sim.simcuda import GRANULE, NOTHING, SPAN, SimConfig, SimCuda
from vmserve import _core
from vmserve._core import Health, MapperMode, OpKind, View, ZeroPolicy
from vmserve.errors import DriverError, OutOfMemoryError

GROUPS = 2
MAX_SEQS = 6
VALUES_PER_TENANT = 80
ERRORS = (*(1, 2, 999) * 20, 700)
"""CUresults: invalid value, out of memory, unknown; and, seldom, a sticky one: illegal address."""

CoreOp = tuple[OpKind, int, int, int, int, View]


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


@dataclass(eq=False)
class Seq:
    """One open sequence as it should be. ``values`` ``[groups, max_len]``; 0: nobody knows."""

    id: int
    tenant: int
    paged: bool
    salt: str
    weights: int
    stream: list[int]
    known: int
    nameless: bool
    values: NDArray[np.int16]
    length: int = 0
    first: int = 0
    swapped: bool = False
    shares: bool = False


@dataclass
class Begun:
    """An epoch that is not launched yet."""

    epoch: int
    kernels: list[tuple[str, NDArray[Any]]]
    writes: list[tuple[Seq, int, int]]


@dataclass
class Life:
    setting: Setting
    rng: random.Random = field(init=False)
    sim: SimCuda = field(init=False)
    core: Any = field(init=False)
    seqs: dict[int, Seq] = field(default_factory=dict)
    begun: deque[Begun] = field(default_factory=deque)
    last_launched: int = 0
    weights: int = 0
    num_opened: int = 0
    num_steps: int = 0
    num_raised: int = 0
    lost: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(self.setting.seed ^ 0x5EED)
        self.sim = SimCuda(self.setting.machine)
        frames = GROUPS * self.setting.max_pages
        driver = _core.CudaDriver(GRANULE, frames, library=str(self.sim.path), spare_bytes=0)
        self.core = _core.KVMemory(driver, **self.setting.core)
        core, groups = self.core, range(GROUPS)
        self.arenas = [core.arena_buffer(group).ctypes.data for group in groups]
        self.slots = [core.slots_buffer(group).ctypes.data for group in groups]
        self.slot_bytes = core.slots_buffer(0).shape[1]
        self.max_len: int = self.setting.core["max_len"]

    # -- contents

    def compute(self, seq: Seq, start: int = 0) -> None:
        """The values from `start` on, whatever was there."""
        width = self.setting.block_tokens
        for group in range(GROUPS):
            name = (group, seq.tenant, seq.salt, seq.weights)
            digest = zlib.crc32(repr(name).encode())
            for block in range(0, self.max_len, width):
                tokens = seq.stream[block : block + width]
                for place, token in enumerate(tokens):
                    if block + place >= start:
                        value = zlib.crc32(bytes([token]), digest) % VALUES_PER_TENANT
                        value += seq.tenant * VALUES_PER_TENANT + 1
                        seq.values[group, block + place] = value
                digest = zlib.crc32(bytes(tokens), digest)

    def spans(self, seq: Seq, old: int) -> NDArray[Any]:
        """Its kernel: writes positions from `old` on, reads those before and behind."""
        setting = self.setting
        width, token_bytes = setting.block_tokens, setting.token_bytes
        slot = self.core.slot(seq.id)
        blocks = self.core.blocks(seq.id)
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
            values[: seq.length - seq.first] = seq.values[group, seq.first : seq.length]
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
        elif draw < 0.82 and self.seqs:
            self.release(rng.choice(list(self.seqs.values())))
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
        if self.lost:
            return
        self.core.check()
        for seq in self.seqs.values():
            assert self.core.length(seq.id) == seq.length
            assert self.core.swapped(seq.id) == seq.swapped

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

    def open(self, tenant: int, *, paged: bool, nameless: bool) -> Seq | None:
        rng = self.rng
        ones = rng.choice([1, self.max_len // 4, self.max_len // 2, self.max_len])
        stream = [1] * ones + [2] * (self.max_len - ones)  # prefixes collide
        salt = rng.choice(["", "", "", "salt"])
        known = 0 if nameless else rng.randint(1, self.max_len)
        view = View.PAGED if paged else View.VIRTUAL
        id_ = self.core.open(tenant, view, salt.encode(), stream[:known])
        self.num_opened += 1
        if id_ is None:
            assert len(self.seqs) == MAX_SEQS
            return None
        if nameless:
            salt = f"private {self.num_opened}"
        values = np.zeros((GROUPS, self.max_len), np.int16)
        seq = Seq(id_, tenant, paged, salt, self.weights, stream, known, nameless, values)
        self.compute(seq)
        self.seqs[id_] = seq
        return seq

    def growth(self, seq: Seq, length: int, *, most: int | None = None) -> list[CoreOp]:
        top = self.max_len if seq.nameless else min(self.max_len, seq.known + 1)
        top = top if most is None else min(top, most)
        to = self.rng.randint(length, top) if top > length else length
        if to == 0:
            to = 1
        slides = length > 0 and self.rng.random() < 0.08
        first = self.rng.randint(seq.first, length) if slides else 0
        return [(OpKind.GROW, seq.id, to, first, -1, View.VIRTUAL)]

    def admit(self) -> None:
        rng = self.rng
        ops: list[CoreOp] = []
        opened = []
        for _ in range(rng.randint(1, 2)):
            nameless = rng.random() < 0.1
            seq = self.open(rng.choice([0, 0, 1, 2]), paged=rng.random() < 0.5, nameless=nameless)
            if seq is None:
                continue
            opened.append(seq)
            matched = self.core.match(seq.id)
            if matched > 0 and rng.random() < 0.9:
                ops.append((OpKind.ATTACH, seq.id, matched, 0, -1, View.VIRTUAL))
            else:
                matched = 0
            ops += self.growth(seq, matched)
        if ops and not self.apply(ops):
            for seq in opened:
                self.release(seq)

    def decode(self) -> None:
        """A token or a few for most sequences: what an engine does nearly always."""
        rng = self.rng
        ops: list[CoreOp] = []
        for seq in list(self.seqs.values()):
            if seq.length == 0 or seq.swapped or rng.random() < 0.2:
                continue
            if not seq.nameless and seq.known <= seq.length and seq.known < self.max_len:
                self.core.append_tokens([seq.id], [seq.stream[seq.known]])
                seq.known += 1
            ops += self.growth(seq, seq.length, most=seq.length + rng.choice([1, 1, 1, 5]))
        if ops:
            self.apply(ops)

    def mix(self) -> None:
        """Conversions and swaps among growths."""
        rng = self.rng
        ops: list[CoreOp] = []
        for seq in rng.sample(list(self.seqs.values()), min(len(self.seqs), 3)):
            if seq.length == 0:
                continue
            if seq.swapped:
                ops.append((OpKind.SWAP_IN, seq.id, 0, 0, -1, View.VIRTUAL))
            elif rng.random() < 0.5:
                view = rng.choice([View.PAGED, View.VIRTUAL])
                ops.append((OpKind.CONVERT, seq.id, 0, 0, -1, view))
            else:
                ops.append((OpKind.SWAP_OUT, seq.id, 0, 0, -1, View.VIRTUAL))
                continue
            if rng.random() < 0.5:
                ops += self.growth(seq, seq.length)
        if ops:
            self.apply(ops)

    def make_way(self) -> None:
        """Somebody's pages are wanted at once, while the copies of them run; or it comes back."""
        rng = self.rng
        present = [seq for seq in self.seqs.values() if seq.length and not seq.swapped]
        victims = rng.sample(present, min(len(present), rng.choice([1, 1, 2])))
        swaps: list[CoreOp] = [(OpKind.SWAP_OUT, seq.id, 0, 0, -1, View.VIRTUAL) for seq in victims]
        if not swaps or not self.apply(swaps):
            return
        for _ in range(rng.randint(1, 3)):
            if self.lost:
                return
            rng.choice([self.decode, self.decode, self.admit, self.fork])()
            self.launch(rng.randint(0, 2))
            if rng.random() < 0.3:
                self.sim.pump(1)
        back = rng.choice(victims)
        if rng.random() < 0.5 and not self.lost and back.id in self.seqs and back.swapped:
            self.apply([(OpKind.SWAP_IN, back.id, 0, 0, -1, View.VIRTUAL)])

    def fork(self) -> None:
        rng = self.rng
        parents = [s for s in self.seqs.values() if s.length and not s.swapped and s.first == 0]
        if not parents:
            return
        parent = rng.choice(parents)
        child = self.open(parent.tenant, paged=rng.random() < 0.5, nameless=False)
        if child is None:
            return
        end = rng.randint(1, parent.length)
        ops: list[CoreOp] = [(OpKind.FORK, child.id, end, 0, parent.id, View.VIRTUAL)]
        saved = (child.salt, child.weights, child.stream, child.known, child.nameless)
        child.salt, child.weights = parent.salt, parent.weights
        child.stream = parent.stream[:end] + [3] * (self.max_len - end)
        child.nameless = parent.nameless or parent.known < end
        child.known = min(parent.known, end)
        self.compute(child)
        child.values[:, :end] = parent.values[:, :end]
        if rng.random() < 0.6:
            ops.append((OpKind.GROW, child.id, min(end + 1, self.max_len), 0, -1, View.VIRTUAL))
        parent.shares = child.shares = True
        if not self.apply(ops):
            child.salt, child.weights, child.stream, child.known, child.nameless = saved
            self.release(child)

    def may_copy(self, op: CoreOp) -> bool:
        """Something that an epoch which is not launched yet may still write."""
        kind, seq = op[0], self.seqs[op[1]]
        if kind in (OpKind.FORK, OpKind.CONVERT, OpKind.SWAP_OUT):
            return True
        return kind is OpKind.GROW and seq.paged and seq.shares

    def apply(self, ops: Sequence[CoreOp]) -> bool:
        if self.begun and any(self.may_copy(op) for op in ops):
            self.launch(len(self.begun))
        plan = self.core.plan(ops)
        if not plan.fits:
            if plan.waiting_pages:
                self.launch(len(self.begun))
                self.sim.pump()
            return False
        epochs: list[int] = []
        if not self.guarded(lambda: epochs.append(self.core.apply(ops, plan.version))):
            return False
        old: dict[int, int] = {}
        for kind, id_, num_tokens, first, _, view in ops:
            seq = self.seqs[id_]
            old.setdefault(id_, seq.length)
            if kind in (OpKind.ATTACH, OpKind.FORK):
                old[id_] = seq.length = num_tokens
                seq.shares = True
            elif kind is OpKind.CONVERT:
                seq.paged = view is View.PAGED
            elif kind is OpKind.SWAP_OUT:
                seq.swapped = True
            elif kind is OpKind.SWAP_IN:
                seq.swapped = False
            else:
                seq.length = max(seq.length, num_tokens)
                seq.first = max(seq.first, first)
        begun = Begun(epochs[0], [], [])
        for id_, length in old.items():
            seq = self.seqs[id_]
            if seq.swapped or seq.length == 0 or self.lost:
                continue
            label = f"kernel of sequence {id_} in epoch {epochs[0]}, step {self.num_steps},"
            begun.kernels.append((label, self.spans(seq, length)))
            begun.writes.append((seq, length, seq.length))
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
        self.core.stats()
        for begun in self.begun:
            for seq, start, stop in begun.writes:
                seq.values[:, start:stop] = 0
        self.core.abandon_epoch(self.begun[-1].epoch)
        self.begun.clear()

    # -- the rest

    def release(self, seq: Seq) -> None:
        assert self.guarded(lambda: self.core.release(seq.id))
        del self.seqs[seq.id]

    def keep_house(self) -> None:
        rng, core = self.rng, self.core
        chore = rng.choice(
            ["trim", "trim", "limit", "compact", "compact", "cache", "mapper", "settle", "copies"]
        )
        if chore == "trim":
            keep, drop = rng.randint(0, 4), rng.random() < 0.5
            self.guarded(lambda: core.trim(keep, drop))
        elif chore == "limit":
            limit = rng.randint(4, self.setting.max_pages)
            self.guarded(lambda: core.set_limit(limit))
        elif chore == "compact":
            if rng.random() < 0.5:
                self.launch(len(self.begun))
                self.sim.pump()
                core.stats()
            self.guarded(core.compact)
        elif chore == "cache":
            if rng.random() < 0.3:
                core.clear_cache()
                self.weights += 1
                for seq in self.seqs.values():
                    seq.nameless = True
        elif chore == "mapper":
            count = rng.randint(1, 3)
            self.guarded(lambda: core.run_mapper(count))
        elif chore == "copies":
            self.guarded(core.finish_copies)
        else:
            self.guarded(core.settle_mapper)

    def finish(self) -> None:
        """Everything reads back right, then everything comes back."""
        core, null = self.core, int(self.setting.core["null_page"])
        self.launch(len(self.begun))
        if self.lost:
            return
        self.sim.pump()
        for seq in [s for s in self.seqs.values() if not s.swapped and s.length]:
            label = f"the last kernel of sequence {seq.id}"
            self.sim.launch_spans(self.spans(seq, seq.length), label)
        self.sim.pump()
        self.check()
        for seq in list(self.seqs.values()):
            core.release(seq.id)
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
