"""The specification of a memory of several kinds of layers, in executable form.

The core chooses pages, blocks and slots; the model says what every sequence must be: its length,
its view, and the contents that the next token of each kind sees through the kind's window. A
position's value depends on all that KV depends on (tenant, salt, weights, tokens up to it, kind and
group), so that right contents prove the right block. Positions behind a window may be gone, and are
not read. A state depends on all tokens up to the sequence's length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.memory.support import BLOCK_TOKENS, PAGE, Memory
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


@dataclass
class KindsRig:
    """The core, the drivers of its kinds, and what its sequences must be."""

    core: _core.KindsMemory
    parts: list[Memory]
    max_len: int
    seqs: dict[int, Expected] = field(default_factory=dict)
    weights: int = 0

    def value(self, seq: Expected, position: int, kind: int, group: int) -> NDArray[np.uint8]:
        """What a position holds: 8 bytes, repeated."""
        name = repr((seq.tenant, seq.salt, seq.weights, seq.tokens[: position + 1], kind, group))
        word = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8).digest(), np.uint8)
        return np.resize(word, self.parts[kind].token_bytes)

    def state_value(self, seq: Expected) -> NDArray[np.uint8]:
        name = repr((seq.tenant, seq.salt, seq.weights, seq.tokens[: seq.length], "state"))
        word = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8).digest(), np.uint8)
        return np.resize(word, PAGE)

    def state_page(self, number: int) -> NDArray[np.uint8]:
        [block] = self.parts[STATE].blocks(number)
        page: NDArray[np.uint8] = self.parts[STATE].core.arena_buffer(0)[block]
        return page

    def first_seen(self, seq: Expected, kind: int) -> int:
        """The first position that the next token sees."""
        window = KINDS[kind][0]
        return max(0, seq.length + 1 - window) if window else 0

    def write(self, number: int, start: int) -> None:
        seq = self.seqs[number]
        for kind, (_, groups) in enumerate(KINDS):
            for group in range(groups):
                for position in range(start, seq.length):
                    self.parts[kind].row(number, group, position)[:] = self.value(
                        seq, position, kind, group
                    )
        if len(self.parts) > STATE and seq.length > start:
            self.state_page(number)[:] = self.state_value(seq)

    def check(self) -> None:
        """The core's own laws, and what the next tokens see."""
        self.core.check()
        for number, seq in self.seqs.items():
            if len(self.parts) > STATE and seq.length > 0 and not seq.swapped:
                assert (self.state_page(number) == self.state_value(seq)).all(), number
            for kind, (_, groups) in enumerate(KINDS):
                part = self.parts[kind]
                assert part.core.length(number) == seq.length
                assert part.core.view(number) is seq.view
                assert part.core.swapped(number) is seq.swapped
                if seq.swapped:
                    continue
                for group in range(groups):
                    for position in range(self.first_seen(seq, kind), seq.length):
                        wanted = self.value(seq, position, kind, group)
                        found = part.row(number, group, position)
                        assert (found == wanted).all(), (number, kind, group, position)

    def committed_bytes(self) -> int:
        stats = [part.core.stats() for part in self.parts]
        return sum(each.committed_pages * each.page_bytes for each in stats)


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
    **options: int,
) -> KindsRig:
    faults, described = [], []
    for window, groups in (*KINDS, (0, 1))[: STATE + has_state]:
        most = max_pages * WHOLE_GROUPS // groups
        driver = _core.FaultInjectingDriver(_core.HostDriver(PAGE, most * groups))
        own = {
            "num_groups": groups,
            "block_tokens": BLOCK_TOKENS,
            "blocks_per_page": blocks_per_page,
            "token_bytes": PAGE // (blocks_per_page * BLOCK_TOKENS),
            "max_seqs": max_seqs,
            "num_slots": num_slots,
            "max_len": max_len,
            "limit_pages": limit_pages * WHOLE_GROUPS // groups,
            "max_pages": most,
            "zero_policy": zero_policy,
            "mapper": mapper,
            **options,
        }
        if len(described) == STATE:
            own |= {"state_bytes": PAGE, "checkpoint_tokens": CHECKPOINT_TOKENS}
            own |= {"blocks_per_page": 1, "null_page": False}
        faults.append(driver)
        described.append((driver, window, own))
    core = _core.KindsMemory(described, limit_pages)
    parts = [
        Memory(part, driver, blocks_per_page)
        for part, driver in zip(core.kinds, faults, strict=True)
    ]
    return KindsRig(core, parts, max_len)


def blocks_of(rig: KindsRig, kind: int, seq: int) -> Sequence[int]:
    return rig.parts[kind].blocks(seq)
