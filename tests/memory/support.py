"""A small KV memory for tests: 2 groups, pages of 4 tokens of 1 KiB (one granule of 4 KiB)."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vmserve import _core

PAGE = 4096
PAGE_TOKENS = 4
TOKEN_BYTES = PAGE // PAGE_TOKENS
GROUPS = 2

STATE_FIELDS = (
    "limit_pages",
    "committed_pages",
    "free_pages",
    "used_pages",
    "quarantined_pages",
    "shared_pages",
    "used_slots",
    "used_tokens",
    "tail_waste_bytes",
    "memfd_allocated_bytes",
    "num_mappings",
    "pending_repairs",
)
TOTAL_FIELDS = (
    "pages_mapped_total",
    "pages_unmapped_total",
    "pages_committed_total",
    "pages_given_back_total",
    "pages_zeroed_total",
    "map_calls_total",
    "unmap_calls_total",
    "arena_map_calls_total",
    "map_seconds_total",
)


@dataclass
class Memory:
    """The core, the fault-injecting driver behind it, and the slots that are in use."""

    core: _core.KVMemory
    faults: _core.FaultInjectingDriver
    slots: set[int] = field(default_factory=set)

    def alloc(self, tenant: int = 0) -> int:
        slot = self.core.alloc_slot(tenant)
        assert slot is not None
        self.slots.add(slot)
        return slot

    def grow(self, *growths: tuple[int, int]) -> None:
        needed, available, version = self.core.plan(growths)
        assert needed <= available
        self.core.apply(growths, version)

    def release(self, slot: int) -> None:
        self.core.release(slot)
        self.slots.discard(slot)

    def fork(self, slot: int, num_tokens: int) -> int:
        forked = self.core.fork_slot(slot, num_tokens)
        assert forked is not None
        self.slots.add(forked)
        return forked

    def table(self, slot: int) -> list[int]:
        return [int(page) for page in self.core.block_table(slot)]

    def tokens(self, slot: int, group: int, start: int, stop: int) -> NDArray[np.uint8]:
        """uint8 ``[tokens, TOKEN_BYTES]`` of the slot; only what is mapped may be touched."""
        row: NDArray[np.uint8] = self.core.slots_buffer(group)[slot]
        return row[start * TOKEN_BYTES : stop * TOKEN_BYTES].reshape(-1, TOKEN_BYTES)

    def page(self, page: int, group: int) -> NDArray[np.uint8]:
        """uint8 ``[PAGE]``: the page in the arena."""
        content: NDArray[np.uint8] = self.core.arena_buffer(group)[page]
        return content

    def stat(self, name: str) -> int:
        return int(getattr(self.core.stats(), name))

    def state(self, *, totals: bool = False) -> dict[str, Any]:
        """Everything that a failed call must leave as it was."""
        stats = self.core.stats()
        names = STATE_FIELDS + (TOTAL_FIELDS if totals else ())
        return {
            **{name: getattr(stats, name) for name in names},
            "tables": {slot: self.table(slot) for slot in sorted(self.slots)},
            "lengths": {slot: self.core.slot_length(slot) for slot in sorted(self.slots)},
        }


def make_memory(
    *,
    num_slots: int = 4,
    max_len: int = 32,
    limit_pages: int = 16,
    max_pages: int = 32,
    grow_pages: int = 1,
    read_slack: int = 0,
    zero_policy: _core.ZeroPolicy = _core.ZeroPolicy.ALWAYS,
    max_map_count: int = 0,
) -> Memory:
    host = _core.HostDriver(PAGE, GROUPS * max_pages, max_map_count=max_map_count)
    faults = _core.FaultInjectingDriver(host)
    core = _core.KVMemory(
        faults,
        num_groups=GROUPS,
        page_tokens=PAGE_TOKENS,
        token_bytes=TOKEN_BYTES,
        num_slots=num_slots,
        max_len=max_len,
        read_slack=read_slack,
        limit_pages=limit_pages,
        max_pages=max_pages,
        grow_pages=grow_pages,
        zero_policy=zero_policy,
    )
    return Memory(core, faults)


def pss_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel reports no PSS")


def kernel_mappings(address: int, num_bytes: int) -> int:
    """How many of the process's mappings lie in the range, as the kernel counts them."""
    count = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        count += start < address + num_bytes and end > address
    return count


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """The code in a process of its own, which it may crash; it imports what this one imports."""
    path = [*sys.path, str(Path(__file__).parents[2])]
    return subprocess.run(
        [sys.executable, *(["-S"] if sys.flags.no_site else []), "-c", code],
        env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
