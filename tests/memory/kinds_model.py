"""The specification of a memory of several kinds of layers, in executable form.

The core chooses pages, blocks and slots; the model says what every sequence must be: its length,
its view, and the contents that the next token of each kind sees through the kind's window. A
position's value depends on all that KV depends on (tenant, salt, weights, tokens up to it, kind and
group), so that right contents prove the right block. Positions behind a window may be gone, and are
not read. A state depends on all tokens up to the sequence's length. A step in flight reads where
things were when it began (:class:`LateReads`), until it ends.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.memory.groups import everywhere, with_another
from tests.memory.support import BLOCK_TOKENS, PAGE
from vmserve import _core
from vmserve._core import MapperMode, View, ZeroPolicy

#: (window, groups of layers) of each kind that keeps tokens.
KINDS = ((0, 1), (6, 2), (11, 1))
WHOLE_GROUPS = sum(groups for _, groups in KINDS)
#: The kind after these, with a state of a page, and the tokens between its checkpoints.
STATE = len(KINDS)
CHECKPOINT_TOKENS = 8


@dataclass
class Expected:
    tenant: int
    salt: bytes
    weights: int
    view: View
    tokens: list[int]
    length: int = 0
    swapped: bool = False


@dataclass(repr=False)  # unmapped memory cannot be shown
class LateReads:
    """What a step in flight may still read or write of one group of a sequence: memory as its
    kernels were told of it, and the contents. Of a sequence that was released meanwhile it must
    only be there: later kernels, which run behind, may write to what others share. So may those of
    a fork, once the sequence has copied what they shared."""

    number: int
    rows: list[NDArray[np.uint64]]
    at: Any
    wanted: NDArray[np.uint64]
    is_released: bool = False

    def check(self) -> None:
        for rows in self.rows:
            right = rows[self.at] == self.wanted[:, None]
            assert self.is_released or right.all(), np.flatnonzero(~right.all(axis=1))

    def accept(self) -> None:
        """Expect what is there now, and was written by kernels that run later."""
        self.wanted = self.rows[0][self.at][:, 0].copy()


@dataclass
class Part:
    """A kind of layers of the core, and the fault-injecting driver behind it.

    ``driver``: the kind's, which has the other as its only or one of its members.
    """

    faults: _core.FaultInjectingDriver
    driver: _core.PageDriver
    token_bytes: int


@dataclass
class KindsRig:
    """The core, the drivers of its kinds, and what its sequences must be."""

    core: _core.KVMemory
    parts: list[Part]
    max_len: int
    seqs: dict[int, Expected] = field(default_factory=dict)
    weights: int = 0

    def words(self, seq: Expected, kind: int, group: int = 0) -> NDArray[np.uint64]:
        """What each position holds: a word, repeated."""
        return _words(seq.tenant, seq.salt, seq.weights, tuple(seq.tokens)) ^ np.uint64(
            (1 + 8 * kind + group) * 0x9E3779B97F4A7C15 % 2**64
        )

    def rows(self, number: int, kind: int, group: int) -> tuple[list[NDArray[np.uint64]], Any]:
        """Memory as the sequence's kernels see it, of each member of a group of drivers, and how
        positions are found in it."""
        core, part = self.core, self.parts[kind]
        words = part.token_bytes // 8
        if core.view(number) is View.VIRTUAL:
            slots = core.slots_buffer(group, kind)
            slot = core.slot(number)
            line = slots[slot].view(np.uint64).reshape(-1, words)
            return everywhere(part.driver, line), lambda positions: positions
        arena = core.arena_buffer(group, kind).view(np.uint64).reshape(-1, BLOCK_TOKENS, words)
        blocks = np.asarray(core.blocks(number, kind))
        arenas = everywhere(part.driver, arena)
        return arenas, lambda at: (blocks[at // BLOCK_TOKENS], at % BLOCK_TOKENS)

    def state_pages(self, number: int) -> list[NDArray[np.uint64]]:
        """The sequence's page of states, in each member of a group of drivers."""
        [block] = blocks_of(self, STATE, number)
        page = self.core.arena_buffer(0, STATE)[block].view(np.uint64)
        return everywhere(self.parts[STATE].driver, page)

    def first_seen(self, seq: Expected, kind: int) -> int:
        """The first position that the next token sees."""
        window = KINDS[kind][0]
        return max(0, seq.length + 1 - window) if window else 0

    def write(self, number: int, start: int) -> None:
        seq = self.seqs[number]
        for kind, (_, groups) in enumerate(KINDS):
            for group in range(groups):
                if start < seq.length:
                    members, at = self.rows(number, kind, group)
                    positions = np.arange(start, seq.length)
                    for rows in members:
                        rows[at(positions)] = self.words(seq, kind, group)[positions, None]
        if len(self.parts) > STATE and seq.length > start:
            for page in self.state_pages(number):
                page[:] = self.words(seq, STATE)[seq.length - 1]

    def check(self) -> None:
        """The core's own laws, and what the next tokens see."""
        self.core.check()
        for number, seq in self.seqs.items():
            if len(self.parts) > STATE and seq.length > 0 and not seq.swapped:
                wanted = self.words(seq, STATE)[seq.length - 1]
                assert all((page == wanted).all() for page in self.state_pages(number)), number
            assert self.core.length(number) == seq.length
            assert self.core.view(number) is seq.view
            assert self.core.swapped(number) is seq.swapped
            for kind, (_, groups) in enumerate(KINDS):
                seen = np.arange(self.first_seen(seq, kind), seq.length)
                if seq.swapped or not len(seen):
                    continue
                for group in range(groups):
                    members, at = self.rows(number, kind, group)
                    for rows in members:
                        right = rows[at(seen)] == self.words(seq, kind, group)[seen, None]
                        assert right.all(), (number, kind, group, seen[~right.all(axis=1)])

    def late_reads(self, number: int, start: int) -> list[LateReads]:
        """Of a step that computes the sequence from ``start`` on, which has been applied."""
        seq, reads = self.seqs[number], []
        for kind, (window, groups) in enumerate(KINDS):
            first = max(0, start + 1 - window) if window else 0
            positions = np.arange(first, seq.length)
            for group in range(groups):
                rows, at = self.rows(number, kind, group)
                wanted = self.words(seq, kind, group)[positions]
                reads.append(LateReads(number, rows, at(positions), wanted))
        return reads

    def num_refused(self) -> Counter[str]:
        """Calls that the drivers have refused, by name."""
        return sum((Counter(part.faults.num_refused) for part in self.parts), Counter[str]())

    def committed_bytes(self) -> int:
        return sum(each.committed_pages * each.page_bytes for each in self.core.kind_stats())


@lru_cache(maxsize=1 << 12)
def _words(tenant: int, salt: bytes, weights: int, tokens: tuple[int, ...]) -> NDArray[np.uint64]:
    """A word of each position, which depends on all tokens up to it."""
    digest = hashlib.blake2b(repr((tenant, salt, weights)).encode(), digest_size=8).digest()
    digests = []
    for token in tokens:
        digest = hashlib.blake2b(digest + struct.pack("<q", token), digest_size=8).digest()
        digests.append(digest)
    return np.frombuffer(b"".join(digests), np.uint64)


def make_kinds(
    *,
    blocks_per_page: int = 1,
    num_slots: int = 3,
    max_seqs: int = 6,
    max_len: int = 40,
    limit_pages: int = 16,
    max_pages: int = 32,
    zero_policy: ZeroPolicy = ZeroPolicy.ALWAYS,
    mapper: MapperMode = MapperMode.OFF,
    has_state: bool = False,
    late_copies: bool = False,
    late_marks: bool = False,
    refused_call: int = 0,
    faulty_member: int | None = None,
    sizes: Sequence[int] = (1, 1, 1),
    **options: int,
) -> KindsRig:
    """``sizes``: of the kinds' pages, in pages of the host; as many bytes more has a token.
    ``refused_call``: the call that the driver of the second kind refuses, from the first on.
    ``faulty_member``: each kind over a group of two drivers, of which this one injects faults."""
    parts: list[Part] = []
    kinds: list[dict[str, Any]] = []
    whole = sum(groups * size for (_, groups), size in zip(KINDS, sizes, strict=True))
    of_kinds = zip((*KINDS, (0, 1)), (*sizes, 1), strict=True)
    for (window, groups), size in [*of_kinds][: STATE + has_state]:
        most = max_pages * whole // (groups * size)
        host = _core.HostDriver(size * PAGE, most * groups)
        driver = _core.FaultInjectingDriver(host, late_copies=late_copies, late_marks=late_marks)
        if refused_call and len(parts) == 1:
            driver.arm(refused_call)
        token_bytes = size * PAGE // (blocks_per_page * BLOCK_TOKENS)
        parts.append(Part(driver, with_another(driver, faulty_member), token_bytes))
        own = {"driver": parts[-1].driver, "window": window, "num_groups": groups}
        own |= {"max_pages": most, "token_bytes": token_bytes}
        if len(kinds) == STATE:
            own |= {"state_bytes": PAGE, "checkpoint_tokens": CHECKPOINT_TOKENS}
            own |= {"blocks_per_page": 1, "null_page": False}
        kinds.append(own)
    core = _core.KVMemory(
        kinds,
        limit_pages,
        block_tokens=BLOCK_TOKENS,
        blocks_per_page=blocks_per_page,
        max_seqs=max_seqs,
        num_slots=num_slots,
        max_len=max_len,
        zero_policy=zero_policy,
        mapper=mapper,
        **options,
    )
    return KindsRig(core, parts, max_len)


def blocks_of(rig: KindsRig, kind: int, seq: int) -> list[int]:
    return [int(block) for block in rig.core.blocks(seq, kind)]
