"""The engine's view of KV memory: plan without mutating, then one call that mutates.

"Does not fit" is a value (:class:`Shortfall`), not an exception: the scheduler asks often, and "no"
is an ordinary answer.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from vmserve._core import MemoryStats
from vmserve.numbers.values import step_value

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from vmserve.memory.layout import KVLayout, LayerKind

__all__ = [
    "Attach",
    "Checkpoints",
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
    "unit_tokens",
]


class Regime(enum.Enum):
    """How kernels see a sequence: contiguous in its slot, or through a block table."""

    VIRTUAL = "virtual"
    PAGED = "paged"

    @property
    def other(self) -> Regime:
        return Regime.PAGED if self is Regime.VIRTUAL else Regime.VIRTUAL


def unit_tokens(layout: KVLayout, regime: Regime) -> int:
    """Tokens that a sequence takes, or shares, at a time: a page's (virtual) or a block's."""
    return layout.page_tokens if regime is Regime.VIRTUAL else layout.block_tokens


class Health(enum.Enum):
    """DEGRADED: pages are held back after a refusal that could not be undone yet. FAILED: the
    device is lost, and every further change is refused."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Positions at which the prefix cache keeps the state of a sequence: steps should end there.

    These are the multiples of ``interval``, and the end of the last whole block before the last
    known token, which a request with the same prompt can continue from.
    """

    interval: int
    block_tokens: int

    def last_reached(self, start: int, end: int, num_known: int) -> int:
        """The last checkpoint in a chunk from ``start`` to ``end``; ``end`` if there is none."""
        last = (num_known - 1) // self.block_tokens * self.block_tokens
        if not start < last <= end:
            last = end // self.interval * self.interval
        return last if last > start else end


class Growth(NamedTuple):
    """Make the first ``num_tokens`` positions of ``seq`` usable (never shrinks).

    The coming step writes positions from its present length on. Positions before ``first_token``
    are needed no more: pages or blocks wholly before it are released. The last ``num_drafted``
    positions count for nothing, and are written again, unless :meth:`KVMemory.keep` is called.
    """

    seq: int
    num_tokens: int
    first_token: int = 0
    num_drafted: int = 0


class Attach(NamedTuple):
    """Start the empty ``seq`` with ``num_tokens`` from the prefix cache (<= ``match(seq)``).

    What is cached can go at any time until a plan with it is applied.
    """

    seq: int
    num_tokens: int


class Fork(NamedTuple):
    """Start the empty ``seq`` with the first ``num_tokens`` of ``parent``."""

    seq: int
    parent: int
    num_tokens: int


class Convert(NamedTuple):
    """Move ``seq`` to ``regime``; no byte is copied if its blocks fill whole pages in order."""

    seq: int
    regime: Regime


class SwapOut(NamedTuple):
    """Copy ``seq``'s blocks to host memory and release its pages."""

    seq: int


class SwapIn(NamedTuple):
    """Bring ``seq`` back from host memory, into the regime it had."""

    seq: int


MemoryOp = Attach | Fork | Convert | SwapOut | SwapIn


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A plan that does not fit, and what is missing.

    ``waiting_pages`` become available when the running steps and copies to host memory end.
    ``excess_pages`` are in use above a lowered limit. ``lost_prefixes``: attaches that ask for more
    than is cached now; with any of them, nothing else was counted.
    """

    needed_pages: int
    available_pages: int
    waiting_pages: int = 0
    excess_pages: int = 0
    missing_slots: int = 0
    missing_swap_blocks: int = 0
    lost_prefixes: int = 0
    #: Memory mappings that slots may need for the plan, and available ones: free, or of parked
    #: slots.
    needed_mappings: int = 0
    available_mappings: int = 0

    @property
    def missing_pages(self) -> int:
        """Pages that must become free; or raise the limit by these."""
        missing = self.needed_pages - self.available_pages
        return missing + self.excess_pages if missing > 0 else 0

    @property
    def missing_mappings(self) -> int:
        return max(0, self.needed_mappings - self.available_mappings)


@step_value
class MemoryPlan:
    """A plan that fits. Opaque to the scheduler; valid until the memory changes in any way."""

    #: The growths as int64 ``[growths, 3]``, or ``[growths, 4]`` with drafts.
    rows: NDArray[np.int64]
    ops: tuple[MemoryOp, ...]
    needed_pages: int
    #: State of the memory that the plan was made for; ``apply`` refuses a stale plan.
    version: int

    @property
    def growths(self) -> tuple[Growth, ...]:
        return tuple(Growth(*row) for row in self.rows.tolist())


class SlotUse(NamedTuple):
    """A part of :class:`MemoryStats`, which is too long to read for every new request."""

    used_slots: int
    free_mappings: int
    pages_unmapped_total: int


class KVMemory(Protocol):
    """One pool of pages seen through slots (virtual view) and an arena (paged view)."""

    layout: KVLayout
    num_slots: int
    max_len: int
    limit_pages: int
    #: Kinds of layers, which have pages of their own; one if all layers share each page.
    kinds: tuple[LayerKind, ...]

    def open(
        self,
        tokens: Sequence[int] = (),
        *,
        regime: Regime = Regime.VIRTUAL,
        tenant: int = 0,
        salt: bytes = b"",
    ) -> int | None:
        """Open an empty sequence that knows ``tokens``; None if no more can be open."""
        ...

    def match(self, seq: int) -> int:
        """Tokens of the empty sequence in the prefix cache (always fewer than its own)."""
        ...

    def restore(self, seq: int, attaching: Sequence[Attach] = ()) -> bool:
        """Read what a store has of the empty sequence's prefix; whether that is under way.

        When it is not any more, :meth:`match` says how much there is. Pages for it are not taken
        from the prefixes of ``attaching``, which the next plan attaches.
        """
        ...

    def finish_restores(self) -> None:
        """Wait for all that is being read."""
        ...

    def plan(
        self, growths: Sequence[Growth] | NDArray[np.int64], ops: Sequence[MemoryOp] = ()
    ) -> MemoryPlan | Shortfall:
        """Plan the growths, and the ops before them, without changing anything.

        Growths as an array are int64 ``[growths, 3]``, or ``[growths, 4]`` with drafts; it belongs
        to the plan from now on.
        """
        ...

    def apply(self, plan: MemoryPlan) -> int:
        """Execute a plan: all of it, or (on a driver failure) nothing. Begins an epoch."""
        ...

    def slots(self, seqs: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int32]:
        """The slots of sequences, -1 without one: int32 ``[len(seqs)]``."""
        ...

    def complete(self, epoch: int) -> None:
        """Note that the step of this epoch, and those before, have computed."""
        ...

    def abandon(self, epoch: int) -> None:
        """End these epochs, and discard what they wrote."""
        ...

    def keep(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        """Count drafted positions that were accepted: ``seqs[i]`` has ``lengths[i]`` tokens.

        To be called before anything else changes these sequences.
        """
        ...

    def append_tokens(
        self, seqs: Sequence[int] | NDArray[np.int64], tokens: Sequence[int] | NDArray[np.int64]
    ) -> None:
        """Publish tokens that became known, ``tokens[i]`` of ``seqs[i]``, to the prefix cache."""
        ...

    def open_seqs(self) -> list[int]:
        """The open sequences."""
        ...

    def release(self, seq: int) -> None:
        """Close the sequence. Its unshared pages become available."""
        ...

    def swap_out(self, seqs: Sequence[int]) -> bool:
        """Copy the sequences' blocks to host memory and release their pages: all, or nothing.

        False if host memory has no room, or the system refuses. If copies run while kernels do,
        the pages become available when the copies end.
        """
        ...

    @property
    def is_copying(self) -> bool:
        """Whether copies to host memory run, which hold pages back."""
        ...

    def finish_copies(self) -> bool:
        """Wait for the copies; False if there are none or they cannot be waited for."""
        ...

    def without_waiting(self) -> AbstractContextManager[None]:
        """A context in which plans do not use pages held back by running steps and copies."""
        ...

    def available_pages(self) -> int:
        """Pages that growths can get now: free, evictable, or not committed yet."""
        ...

    def settle(self) -> bool:
        """Wait for work in the background; whether more pages are available then than
        :meth:`available_pages` said since the last wait."""
        ...

    def trim(self, keep_pages: int = 0, *, drop_idle: bool = False) -> int:
        """Give free pages above ``keep_pages`` back to the system; returns how many."""
        ...

    def stats(self) -> MemoryStats: ...

    def slot_use(self) -> SlotUse: ...

    def check(self) -> None:
        """Verify the conservation laws; raises ``AssertionError`` naming the broken one."""
        ...

    def close(self) -> None: ...
