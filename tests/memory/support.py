"""A small KV memory for tests: 2 groups, pages of one granule (4 KiB), 4 tokens a block."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.memory.groups import everywhere, with_another
from vmserve import _core
from vmserve._core import Access, Backing, MapperMode, OpKind, View, ZeroPolicy
from vmserve.errors import DriverError

PAGE = 4096
BLOCK_TOKENS = 4
GROUPS = 2

Op = tuple[OpKind, int, int, int, int, View]

#: What a failed call must leave as it was, the prefix cache apart.
STATE_FIELDS = (
    "limit_pages", "used_pages", "waiting_pages", "quarantined_pages", "shared_pages",
    "used_blocks", "shared_blocks", "used_slots", "num_seqs", "virtual_seqs", "paged_seqs",
    "swapped_seqs", "used_tokens", "tail_waste_bytes", "swap_blocks", "pending_repairs",
)  # fmt: skip


def grow(seq: int, num_tokens: int, first_token: int = 0) -> Op:
    return (OpKind.GROW, seq, num_tokens, first_token, -1, View.VIRTUAL)


def attach(seq: int, num_tokens: int) -> Op:
    return (OpKind.ATTACH, seq, num_tokens, 0, -1, View.VIRTUAL)


def fork(seq: int, parent: int, num_tokens: int) -> Op:
    return (OpKind.FORK, seq, num_tokens, 0, parent, View.VIRTUAL)


def convert(seq: int, view: View) -> Op:
    return (OpKind.CONVERT, seq, 0, 0, -1, view)


def swap_out(seq: int) -> Op:
    return (OpKind.SWAP_OUT, seq, 0, 0, -1, View.VIRTUAL)


def swap_in(seq: int) -> Op:
    return (OpKind.SWAP_IN, seq, 0, 0, -1, View.VIRTUAL)


@dataclass
class Memory:
    """The core, the fault-injecting driver behind it, and the sequences that are open.

    ``driver``: the core's, which has the other as its only or one of its members.
    """

    core: _core.KVMemory
    faults: _core.FaultInjectingDriver
    driver: _core.PageDriver
    blocks_per_page: int
    seqs: set[int] = field(default_factory=set)

    @property
    def page_tokens(self) -> int:
        return self.blocks_per_page * BLOCK_TOKENS

    @property
    def token_bytes(self) -> int:
        return PAGE // self.page_tokens

    def open(
        self,
        tokens: Sequence[int] = (),
        view: View = View.VIRTUAL,
        tenant: int = 0,
        salt: bytes = b"",
    ) -> int:
        seq = opened(self.core, tenant, view, salt, tokens)
        self.seqs.add(seq)
        return seq

    def fits(self, *ops: Op) -> _core.Plan:
        plan = self.core.plan(ops)
        assert plan.fits, (plan.needed_pages, plan.available_pages, plan.missing_slots)
        return plan

    def begin(self, *ops: Op) -> int:
        return self.core.apply(ops, self.fits(*ops).version)

    def do(self, *ops: Op) -> None:
        """One step, from its plan to its end."""
        self.core.complete(self.begin(*ops))

    def start(self, tokens: Sequence[int], view: View = View.VIRTUAL, tenant: int = 0) -> int:
        """A sequence that is grown to its tokens and written, each byte the token's own."""
        seq = self.open(tokens, view, tenant)
        self.step(seq, 0, tokens)
        return seq

    def step(self, seq: int, start: int, values: Sequence[int], *ops: Op) -> None:
        """The ops, growth by the values behind ``start``, and these written before the end."""
        epoch = self.begin(*ops, grow(seq, start + len(values)))
        self.write(seq, start, values)
        self.core.complete(epoch)

    def grown(self, num_tokens: int, *args: Any, **options: Any) -> int:
        """A sequence of so many tokens, of which none is written."""
        seq = self.open(*args, **options)
        self.do(grow(seq, num_tokens))
        return seq

    def release(self, *seqs: int) -> None:
        for seq in seqs:
            self.core.release(seq)
            self.seqs.discard(seq)

    def blocks(self, seq: int) -> list[int]:
        return [int(block) for block in self.core.blocks(seq)]

    def pages(self, seq: int) -> list[int]:
        """The pages of a virtual sequence, in order."""
        width = self.blocks_per_page
        return [block // width if block >= 0 else -1 for block in self.blocks(seq)[::width]]

    def row(self, seq: int, group: int, position: int) -> NDArray[np.uint8]:
        """uint8 ``[token_bytes]`` as the sequence's kernels see it: slot, or block table."""
        size = self.token_bytes
        if self.core.view(seq) is View.VIRTUAL:
            return self.slot_bytes(seq, group)[position * size : (position + 1) * size]
        return self.in_arena(self.blocks(seq)[position // BLOCK_TOKENS], group, position)

    def rows(self, seq: int, group: int, position: int) -> list[NDArray[np.uint8]]:
        """The row in every member of a group of drivers."""
        return everywhere(self.driver, self.row(seq, group, position))

    def in_arena(self, block: int, group: int, position: int) -> NDArray[np.uint8]:
        size = self.token_bytes
        page, place = divmod(block, self.blocks_per_page)
        start = (place * BLOCK_TOKENS + position % BLOCK_TOKENS) * size
        line: NDArray[np.uint8] = self.core.arena_buffer(group)[page]
        return line[start : start + size]

    def write(self, seq: int, start: int, values: Sequence[int]) -> None:
        for offset, value in enumerate(values):
            for group in range(GROUPS):
                for row in self.rows(seq, group, start + offset):
                    row[:] = value ^ 128 * group

    def read(self, seq: int, start: int = 0, stop: int | None = None) -> list[int]:
        """The values, after checking that all bytes of both groups agree."""
        values = []
        for position in range(start, self.core.length(seq) if stop is None else stop):
            value = int(self.row(seq, 0, position)[0])
            for group in range(GROUPS):
                for row in self.rows(seq, group, position):
                    assert (row == value ^ 128 * group).all(), position
            values.append(value)
        return values

    def slot_bytes(self, seq: int, group: int = 0) -> NDArray[np.uint8]:
        slot = self.core.slot(seq)
        assert slot is not None
        line: NDArray[np.uint8] = self.core.slots_buffer(group)[slot]
        return line

    def stat(self, name: str) -> int:
        return int(getattr(self.core.stats(), name))

    def stats(self, *names: str) -> tuple[int, ...]:
        return tuple(map(self.stat, names))

    def state(self) -> dict[str, Any]:
        """Everything that a failed call must leave as it was."""
        stats, core = self.core.stats(), self.core
        facts = {
            "blocks": self.blocks, "lengths": core.length, "sealed": core.sealed,
            "views": core.view, "slots": core.slot, "swapped": core.swapped,
        }  # fmt: skip
        return {name: getattr(stats, name) for name in STATE_FIELDS} | {
            name: {seq: fact(seq) for seq in sorted(self.seqs)} for name, fact in facts.items()
        }

    def content(self) -> dict[int, list[int]]:
        return {
            seq: self.read(seq, 0, self.core.sealed(seq))
            for seq in sorted(self.seqs)
            if not self.core.swapped(seq)
        }


def make_memory(
    *,
    blocks_per_page: int = 1,
    num_slots: int = 4,
    max_seqs: int = 8,
    max_len: int = 32,
    limit_pages: int = 16,
    max_pages: int = 32,
    zero_policy: ZeroPolicy = ZeroPolicy.ALWAYS,
    mapper: MapperMode = MapperMode.OFF,
    num_frames: int = 0,
    max_map_count: int = 0,
    faulty_member: int | None = None,
    is_remote: bool = False,
    late_copies: bool = False,
    **options: Any,
) -> Memory:
    """``faulty_member``: over a group of two drivers, of which this one injects faults;
    ``is_remote``: behind a rank's loop."""
    frames = num_frames or GROUPS * max_pages
    host = _core.HostDriver(PAGE, frames, max_map_count=max_map_count)
    faults = _core.FaultInjectingDriver(host, late_copies=late_copies)
    driver = with_another(faults, faulty_member, max_map_count=max_map_count, is_remote=is_remote)
    core = _core.KVMemory(
        [{"driver": driver}],
        num_groups=GROUPS,
        block_tokens=BLOCK_TOKENS,
        blocks_per_page=blocks_per_page,
        max_seqs=max_seqs,
        num_slots=num_slots,
        max_len=max_len,
        limit_pages=limit_pages,
        max_pages=max_pages,
        zero_policy=zero_policy,
        mapper=mapper,
        **{"token_bytes": PAGE // (blocks_per_page * BLOCK_TOKENS), **options},
    )
    return Memory(core, faults, driver, blocks_per_page)


def opened(memory: Any, *args: Any, **options: Any) -> int:
    """A sequence of a core's memory or of a manager's, which has room for it."""
    seq = memory.open(*args, **options)
    assert seq is not None
    return int(seq)


def mapped(
    driver: _core.PageDriver,
    num_frames: int,
    num_reserved: int = 0,
    access: Access = Access.READ_WRITE,
) -> int:
    """The start of a reservation of so many frames, which shows the driver's first ones."""
    base = driver.reserve(max(num_frames, num_reserved) * driver.frame_bytes, Backing.TRAP)
    driver.create([(0, num_frames)])
    driver.map([(base, 0, num_frames, access)])
    return base


def lost(call: Callable[[], object], words: str) -> None:
    """A driver's rank is gone, for ever."""
    with pytest.raises(DriverError, match=words) as caught:
        call()
    assert caught.value.sticky
    assert caught.value.errno == errno.ECONNRESET


@dataclass
class Area:
    """A mapping of this process, as the kernel tells it."""

    first: int
    end: int
    access: str
    line: str
    kib: dict[str, int] = field(default_factory=dict)


def areas(address: int = 0, num_bytes: int = 1 << 64) -> list[Area]:
    """The mappings that have a part in the range."""
    found: list[Area] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name:
            found.append(Area(*(int(part, 16) for part in name.split("-")), rest[0][:2], line))
        elif rest[-1:] == ["kB"]:
            found[-1].kib[name] = int(rest[0])
    return [area for area in found if area.first < address + num_bytes and area.end > address]


def system_of(root: Path, files: dict[str, str]) -> _core.SystemLimits:
    """The limits that a system with these files has."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return _core.SystemLimits(str(root))
