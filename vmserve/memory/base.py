"""The engine's view of KV memory: plan without mutating, then one call that mutates.

"Does not fit" is a value (:class:`Shortfall`), not an exception: the scheduler asks
often, and the answer "no" is an ordinary one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vmserve.attention.base import ContiguousView
    from vmserve.memory.layout import KVLayout

__all__ = ["Growth", "KVMemory", "MemoryPlan", "MemoryStats", "Shortfall"]


@dataclass(frozen=True, slots=True)
class Growth:
    """Make the first ``num_tokens`` positions of ``slot`` usable (never shrinks)."""

    slot: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A plan that does not fit: how many pages it needs, and how many there are to take."""

    needed_pages: int
    available_pages: int

    @property
    def missing_pages(self) -> int:
        return self.needed_pages - self.available_pages


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Growths that fit. Opaque to the scheduler; valid until the next ``apply`` or ``release``."""

    growths: tuple[Growth, ...]
    needed_pages: int
    #: The state of the memory that this plan was made for; ``apply`` refuses a stale one.
    version: int


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """A snapshot. Pages are counted once, however many groups and aliases they have."""

    page_bytes: int
    """Bytes of one page over all groups."""
    page_tokens: int
    limit_pages: int
    committed_pages: int
    free_pages: int
    """Committed and owned by nobody."""
    used_pages: int
    shared_pages: int
    quarantined_pages: int
    """Held back after a refusal of the system that could not be undone yet; 0 when healthy."""
    num_slots: int
    used_slots: int
    used_tokens: int
    tail_waste_bytes: int
    """Bytes in live sequences' last pages beyond their length."""
    pages_mapped_total: int
    pages_unmapped_total: int
    pages_committed_total: int
    pages_given_back_total: int
    pages_zeroed_total: int
    map_calls_total: int
    unmap_calls_total: int
    arena_map_calls_total: int
    map_seconds_total: float
    memfd_allocated_bytes: int
    num_mappings: int
    """Mappings (runs) that the driver holds now; bounded by vm.max_map_count on the host."""

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class KVMemory(Protocol):
    """One pool of pages seen through slots (virtual view) and an arena (paged view)."""

    layout: KVLayout
    num_slots: int
    max_len: int

    def alloc_slot(self, tenant: int = 0) -> int | None:
        """An empty slot, or None when all are taken."""
        ...

    def plan(self, growths: Sequence[Growth]) -> MemoryPlan | Shortfall:
        """Read-only: what the growths would take."""
        ...

    def apply(self, plan: MemoryPlan) -> None:
        """Map what the plan needs: all of it, or (on a driver failure) nothing."""
        ...

    def release(self, slot: int) -> None:
        """Unmap the slot and drop its references; pages nobody references become free."""
        ...

    def trim(self, keep_pages: int = 0) -> int:
        """Give free pages above ``keep_pages`` back to the system; returns how many."""
        ...

    def view(self) -> ContiguousView: ...

    def stats(self) -> MemoryStats: ...

    def check(self) -> None:
        """Verify the conservation laws; raises ``AssertionError`` naming the one broken."""
        ...

    def close(self) -> None: ...
