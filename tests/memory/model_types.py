"""What the model of the KV memory speaks of: operations, observations, sequences."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

NO_BLOCK = -1
NO_PAGE = -1
NUM_TENANTS = 3
VALUES_PER_TENANT = 80

#: Tenant, salt, weights and all tokens up to a block's end: what the prefix cache may go by.
Key = tuple[int, object, int, tuple[int, ...]]


class Violation(AssertionError):
    """The memory did what the specification forbids, or not what it demands."""


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


class Kind(enum.Enum):
    ATTACH = "attach"
    FORK = "fork"
    CONVERT = "convert"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"
    GROW = "grow"


@dataclass(frozen=True)
class Op:
    kind: Kind
    seq: int
    num_tokens: int = 0
    first_token: int = 0
    other: int = -1
    paged: bool = False
    #: The last positions of a growth that count for nothing unless they are kept.
    num_drafted: int = 0


@dataclass(frozen=True)
class Shape:
    block_tokens: int
    blocks_per_page: int
    max_seqs: int
    num_slots: int
    max_len: int
    max_pages: int
    null_page: bool = False
    prefix_caching: bool = True
    swap_blocks: int = 0
    read_slack: int = 0
    #: Positions that a token sees, itself included; 0: all.
    window: int = 0
    #: Copies to host memory run when somebody waits for them, or lets them.
    copies_late: bool = False
    #: Of one run of pages in a slot: one for each group, and again for each in the shadow.
    mappings_per_run: int = 1

    @property
    def page_tokens(self) -> int:
        return self.block_tokens * self.blocks_per_page

    def first_seen(self, length: int) -> int:
        """By the token at the position ``length``."""
        return max(0, length + 1 - self.window) if self.window else 0

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)


@dataclass(frozen=True)
class Seen:
    """One sequence as the memory shows it."""

    blocks: tuple[int, ...] = ()
    length: int = 0
    sealed: int = 0
    paged: bool = False
    swapped: bool = False
    slot: int | None = None


@dataclass(frozen=True)
class Observation:
    seqs: Mapping[int, Seen] = field(default_factory=dict)
    #: The pages that each slot shows, in order; NO_PAGE where there is none.
    slots: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    #: References of every block in a table, as the memory counts them.
    refs: Mapping[int, int] = field(default_factory=dict)
    begun: int = 0
    completed: int = 0
    #: Cached blocks evicted, and times that split pages were packed, since the start.
    evictions: int = 0
    packings: int = 0


@dataclass(frozen=True)
class Write:
    """Positions that an epoch which is not complete writes."""

    seq: int
    epoch: int
    start: int
    stop: int
    own: bool = True  # not inherited by a fork
    drafted: bool = False  # nothing of it is sealed


@dataclass(frozen=True)
class PlanSeen:
    needed: int
    available: int
    missing_slots: int
    fits: bool
    needed_mappings: int = 0
    excess: int = 0


@dataclass
class ModelSequence:
    tenant: int
    paged: bool
    salt: object
    weights: int
    #: The tokens it has or will have; the memory has been told the first `known` of them.
    stream: list[int]
    known: int
    #: A fork beyond its parent's known tokens: no more can become known.
    tokens_unknown: bool = False
    length: int = 0
    sealed: int = 0
    #: First position that is still needed, but for steps that run.
    first: int = 0
    #: Epochs that are not complete, and the first position that each reads.
    reads: list[tuple[int, int]] = field(default_factory=list)
    swapped: bool = False
    writes: list[Write] = field(default_factory=list)
    #: From here on an abandoned epoch left nothing of worth.
    seal_limit: int | None = None
    #: At least so much must show as sealed. What a fork inherits before its parent's epoch is
    #: complete, and what is complete while it is swapped out, may be sealed with its next growth.
    surely_sealed: int = 0
    #: Blocks that were sealed with known tokens: the prefix cache was told of them.
    published: int = 0
    #: And perhaps of so many.
    maybe_published: int = 0

    #: Up to here it has room for positions that can be kept.
    room: int = 0

    @property
    def first_read(self) -> int:
        """What lies before it may be given up; from here on running steps read or write."""
        return min((first for _, first in self.reads), default=self.first)

    def key(self, end: int) -> Key:
        return (self.tenant, self.salt, self.weights, tuple(self.stream[:end]))

    def values(self, group: int) -> list[int]:
        """What belongs at each position of the layer group: one value, in all bytes of a token."""
        digest = zlib.crc32(repr((group, self.tenant, self.salt, self.weights)).encode())
        values = []
        for token in self.stream:
            digest = zlib.crc32(token.to_bytes(4, "little"), digest)
            values.append(self.tenant * VALUES_PER_TENANT + digest % VALUES_PER_TENANT + 1)
        return values


@dataclass(frozen=True)
class Pin:
    """A slot's entry that a kernel of a begun epoch may still read through."""

    slot: int
    index: int
    page: int
    epoch: int


def readable_values(tenant: int) -> Iterable[int]:
    """Bytes that the tenant may see: its own, and zero."""
    first = tenant * VALUES_PER_TENANT + 1
    return (0, *range(first, first + VALUES_PER_TENANT))
