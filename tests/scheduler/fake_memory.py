"""A KVMemory that only counts: the scheduler's tests need no mappings."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from vmserve.memory.base import Attach, Growth, MemoryOp, MemoryPlan, Regime, Shortfall


class CountingMemory:
    """``cached``: how many tokens of every prompt the prefix cache has, whole pages only."""

    def __init__(
        self, limit_pages: int, page_tokens: int = 4, num_slots: int = 8, cached: int = 0
    ) -> None:
        self.layout = SimpleNamespace(page_tokens=page_tokens, pages_for=self._pages_for)
        self.num_slots = num_slots
        self.max_len = limit_pages * page_tokens
        self.limit_pages = limit_pages
        self.cached = cached
        self.lost_pages = 0
        self.pages: dict[int, int] = {}
        self.firsts: dict[int, int] = {}
        self.tokens: dict[int, int] = {}
        self.version = 0

    def open(
        self,
        tokens: Sequence[int] = (),
        *,
        regime: Regime = Regime.VIRTUAL,
        tenant: int = 0,
        salt: bytes = b"",
    ) -> int | None:
        for seq in range(self.num_slots):
            if seq not in self.pages:
                self.pages[seq] = 0
                self.tokens[seq] = len(tokens)
                return seq
        return None

    def match(self, seq: int) -> int:
        most = min(self.cached, self.tokens[seq] - 1)
        return most // self.layout.page_tokens * self.layout.page_tokens

    def plan(
        self, growths: Sequence[Growth], ops: Sequence[MemoryOp] = ()
    ) -> MemoryPlan | Shortfall:
        assert all(isinstance(op, Attach) and op.num_tokens <= self.match(op.seq) for op in ops)
        needed = sum(max(0, self._pages_for(g.num_tokens) - self.pages[g.seq]) for g in growths)
        available = self.available_pages()
        if needed > available:
            return Shortfall(needed, available)
        return MemoryPlan(tuple(growths), tuple(ops), needed, self.version)

    def apply(self, plan: MemoryPlan) -> int:
        assert plan.version == self.version
        for growth in plan.growths:
            self.pages[growth.seq] = max(self.pages[growth.seq], self._pages_for(growth.num_tokens))
            self.firsts[growth.seq] = growth.first_token
        assert self.available_pages() >= 0
        self.version += 1
        return self.version

    def release(self, seq: int) -> None:
        del self.pages[seq]
        self.version += 1

    def available_pages(self) -> int:
        return self.limit_pages - self.lost_pages - sum(self.pages.values())

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.layout.page_tokens)
