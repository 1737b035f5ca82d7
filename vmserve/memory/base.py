"""The engine's view of KV memory: plan without mutating, then one call that mutates.

"Does not fit" is a value (:class:`Shortfall`), not an exception: the scheduler asks
often, and the answer "no" is an ordinary one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from vmserve._core import MemoryStats

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from vmserve.memory.layout import KVLayout

__all__ = [
    "Attach",
    "Convert",
    "Fork",
    "Growth",
    "Health",
    "KVMemory",
    "MemoryOp",
    "MemoryPlan",
    "MemoryStats",
    "Regime",
    "Shortfall",
    "SlotUse",
    "SwapIn",
    "SwapOut",
]


class Regime(enum.Enum):
    """How kernels see a sequence: contiguous in its slot, or through a block table."""

    VIRTUAL = "virtual"
    PAGED = "paged"

    @property
    def other(self) -> Regime:
        return Regime.PAGED if self is Regime.VIRTUAL else Regime.VIRTUAL


class Health(enum.Enum):
    """DEGRADED: pages are held back after a refusal that could not be undone yet.
    FAILED: the device is lost; every further change is refused."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    FAILED = "failed"


class Growth(NamedTuple):
    """Make the first ``num_tokens`` positions of ``seq`` usable (never shrinks).

    Positions from its length on are written in the coming step. Positions before
    ``first_token`` are not needed any more: what lies wholly before is given up.
    """

    seq: int
    num_tokens: int
    first_token: int = 0


class Attach(NamedTuple):
    """The empty ``seq`` starts with ``num_tokens`` from the prefix cache (<= ``match(seq)``)."""

    seq: int
    num_tokens: int


class Fork(NamedTuple):
    """The empty ``seq`` starts with the first ``num_tokens`` of ``parent``."""

    seq: int
    parent: int
    num_tokens: int


class Convert(NamedTuple):
    """``seq`` is in ``regime`` afterwards; no byte is copied where its blocks fill whole pages."""

    seq: int
    regime: Regime


class SwapOut(NamedTuple):
    """``seq``'s blocks go to host memory and its pages are given up."""

    seq: int


class SwapIn(NamedTuple):
    """And back, into the regime it had."""

    seq: int


MemoryOp = Attach | Fork | Convert | SwapOut | SwapIn


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A plan that does not fit, and what is missing of what.

    ``waiting_pages`` become available when the steps that run are complete, and the copies to
    host memory have ended. ``excess_pages`` are in use above a lowered limit.
    """

    needed_pages: int
    available_pages: int
    waiting_pages: int = 0
    excess_pages: int = 0
    missing_slots: int = 0
    missing_swap_blocks: int = 0
    #: Memory mappings that slots may need for the plan, and that can be had: free ones and those
    #: of parked slots.
    needed_mappings: int = 0
    available_mappings: int = 0

    @property
    def missing_pages(self) -> int:
        """How many must become free, or the limit be raised by."""
        missing = self.needed_pages - self.available_pages
        return missing + self.excess_pages if missing > 0 else 0

    @property
    def missing_mappings(self) -> int:
        return max(0, self.needed_mappings - self.available_mappings)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryPlan:
    """What fits. Opaque to the scheduler; valid until memory changes in any way."""

    #: The growths as int64 ``[growths, 3]``.
    rows: NDArray[np.int64]
    ops: tuple[MemoryOp, ...]
    needed_pages: int
    #: The state of the memory that this plan was made for; ``apply`` refuses a stale one.
    version: int

    @property
    def growths(self) -> tuple[Growth, ...]:
        return tuple(Growth(*row) for row in self.rows.tolist())


class SlotUse(NamedTuple):
    """Of :class:`MemoryStats`, which is too long to be read for every newcomer."""

    used_slots: int
    free_mappings: int
    pages_unmapped_total: int


class KVMemory(Protocol):
    """One pool of pages seen through slots (virtual view) and an arena (paged view)."""

    layout: KVLayout
    num_slots: int
    max_len: int
    limit_pages: int

    def open(
        self,
        tokens: Sequence[int] = (),
        *,
        regime: Regime = Regime.VIRTUAL,
        tenant: int = 0,
        salt: bytes = b"",
    ) -> int | None:
        """An empty sequence that knows ``tokens``, or None when no more can be open."""
        ...

    def match(self, seq: int) -> int:
        """How many tokens of the empty sequence are in the prefix cache (always < its own)."""
        ...

    def plan(
        self, growths: Sequence[Growth] | NDArray[np.int64], ops: Sequence[MemoryOp] = ()
    ) -> MemoryPlan | Shortfall:
        """Read-only: what the growths, and the ops before them, would take.

        Growths as an array are int64 ``[growths, 3]``: it is the plan's from here on.
        """
        ...

    def apply(self, plan: MemoryPlan) -> int:
        """Do what was planned: all of it, or (on a driver failure) nothing. Begins an epoch."""
        ...

    def slots(self, seqs: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int32]:
        """The slots of sequences, -1 where they have none: int32 ``[len(seqs)]``."""
        ...

    def complete(self, epoch: int) -> None:
        """The step of this epoch, and those before, have computed."""
        ...

    def abandon(self, epoch: int) -> None:
        """They are over, but what they wrote is worthless."""
        ...

    def append_tokens(
        self, seqs: Sequence[int] | NDArray[np.int64], tokens: Sequence[int] | NDArray[np.int64]
    ) -> None:
        """Tokens that became known, ``tokens[i]`` of ``seqs[i]``: names for the prefix cache."""
        ...

    def release(self, seq: int) -> None:
        """The sequence is gone; pages that nobody references can be had again."""
        ...

    def swap_out(self, seqs: Sequence[int]) -> bool:
        """Copy the sequences' blocks to host memory and give their pages up: all, or nothing.

        False where host memory has no room for them, or the system refuses it. Where the copies run
        beside the kernels the pages can be had when they have ended.
        """
        ...

    @property
    def is_copying(self) -> bool:
        """Whether copies to host memory run, which hold pages back."""
        ...

    def finish_copies(self) -> bool:
        """Wait for them; False if there were none, or they cannot be waited for."""
        ...

    def without_waiting(self) -> AbstractContextManager[None]:
        """Within, plans do without what steps and copies that run hold back."""
        ...

    def available_pages(self) -> int:
        """Pages that growths can get now: free, evictable, or not committed yet."""
        ...

    def trim(self, keep_pages: int = 0, *, drop_idle: bool = False) -> int:
        """Give free pages above ``keep_pages`` back to the system; returns how many."""
        ...

    def stats(self) -> MemoryStats: ...

    def slot_use(self) -> SlotUse: ...

    def check(self) -> None:
        """Verify the conservation laws; raises ``AssertionError`` naming the one broken."""
        ...

    def close(self) -> None: ...
