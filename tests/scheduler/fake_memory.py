"""A KVMemory that only counts: the scheduler's tests need no mappings."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from vmserve.memory.base import Growth, MemoryPlan, Shortfall


class CountingMemory:
    def __init__(self, limit_pages: int, page_tokens: int = 4, num_slots: int = 8) -> None:
        self.layout = SimpleNamespace(page_tokens=page_tokens, pages_for=self._pages_for)
        self.num_slots = num_slots
        self.max_len = limit_pages * page_tokens
        self.limit_pages = limit_pages
        self.pages: dict[int, int] = {}
        self.version = 0

    def alloc_slot(self, tenant: int = 0) -> int | None:
        for slot in range(self.num_slots):
            if slot not in self.pages:
                self.pages[slot] = 0
                return slot
        return None

    def plan(self, growths: Sequence[Growth]) -> MemoryPlan | Shortfall:
        needed = sum(max(0, self._pages_for(g.num_tokens) - self.pages[g.slot]) for g in growths)
        available = self.limit_pages - sum(self.pages.values())
        if needed > available:
            return Shortfall(needed, available)
        return MemoryPlan(tuple(growths), needed, self.version)

    def apply(self, plan: MemoryPlan) -> None:
        assert plan.version == self.version
        for growth in plan.growths:
            self.pages[growth.slot] = max(
                self.pages[growth.slot], self._pages_for(growth.num_tokens)
            )
        assert sum(self.pages.values()) <= self.limit_pages
        self.version += 1

    def release(self, slot: int) -> None:
        del self.pages[slot]
        self.version += 1

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(limit_pages=self.limit_pages, used_pages=sum(self.pages.values()))

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.layout.page_tokens)
