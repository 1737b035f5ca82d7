"""A KVMemory that only counts: the scheduler's tests need no mappings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from vmserve.memory.base import (
    Attach,
    Convert,
    Fork,
    Growth,
    MemoryOp,
    MemoryPlan,
    Regime,
    Shortfall,
    SwapIn,
)


class CountingMemory:
    """``cached``: how many tokens of every prompt the prefix cache has, whole pages only.

    Blocks are pages. Forks share their whole pages, and pay for a copy of the last one.
    """

    def __init__(
        self,
        limit_pages: int,
        page_tokens: int = 4,
        num_slots: int = 8,
        cached: int = 0,
        swap_pages: int = 0,
    ) -> None:
        self.layout = SimpleNamespace(
            page_tokens=page_tokens,
            block_tokens=page_tokens,
            total_page_bytes=4096,
            blocks_per_page=1,
            state_blocks=0,
            pages_for=self._pages_for,
        )
        self.num_slots = num_slots
        self.max_len = limit_pages * page_tokens
        self.limit_pages = limit_pages
        self.kinds = ()
        self.cached = cached
        self.lost_pages = 0
        #: Taken until settle().
        self.held_pages = 0
        #: The pages of each sequence: numbers that forks have in common.
        self.page_lists: dict[int, list[int]] = {}
        self.num_made = 0
        self.regimes: dict[int, Regime] = {}
        self.firsts: dict[int, int] = {}
        self.tokens: dict[int, int] = {}
        self.version = 0
        self.swap_pages = swap_pages
        self.swapped: dict[int, int] = {}
        #: Whether a prefix is being read, asked for at each start.
        self.restores: Callable[[int, Sequence[Attach]], bool] = lambda seq, attaching: False

    def open(
        self,
        tokens: Sequence[int] = (),
        *,
        regime: Regime = Regime.VIRTUAL,
        tenant: int = 0,
        salt: bytes = b"",
    ) -> int | None:
        for seq in range(self.num_slots):
            if seq not in self.page_lists:
                self.page_lists[seq] = []
                self.regimes[seq] = regime
                self.tokens[seq] = len(tokens)
                return seq
        return None

    def restore(self, seq: int, attaching: Sequence[Attach] = ()) -> bool:
        return self.restores(seq, attaching)

    def finish_restores(self) -> None:
        self.held_pages = 0

    def match(self, seq: int) -> int:
        most = min(self.cached, self.tokens[seq] - 1)
        return most // self.layout.page_tokens * self.layout.page_tokens

    def plan(
        self, growths: Sequence[Growth] | NDArray[np.int64], ops: Sequence[MemoryOp] = ()
    ) -> MemoryPlan | Shortfall:
        rows = np.asarray(growths, dtype=np.int64)
        rows = rows.reshape(-1, rows.shape[1] if rows.ndim == 2 else 4)
        assert all(self._is_legal(op) for op in ops)
        attaches = [op for op in ops if isinstance(op, Attach)]
        if lost := sum(op.num_tokens > self.match(op.seq) for op in attaches):
            return Shortfall(0, 0, lost_prefixes=lost)
        parents = {op.seq: op for op in ops if isinstance(op, Fork)}
        back = {op.seq: self.swapped[op.seq] for op in ops if isinstance(op, SwapIn)}
        needed = sum(back.values())
        for growth in (Growth(*row) for row in rows.tolist()):
            fork = parents.get(growth.seq)
            has = len(self.page_lists[growth.seq])
            if fork is not None:
                has = fork.num_tokens // self.layout.page_tokens
            has += back.get(growth.seq, 0)
            needed += max(0, self._pages_for(growth.num_tokens) - has)
        available = self.available_pages()
        if needed > available:
            return Shortfall(needed, available)
        return MemoryPlan(rows, tuple(ops), needed, self.version)

    def _is_legal(self, op: MemoryOp) -> bool:
        if isinstance(op, Attach):
            return not self.page_lists[op.seq]
        if isinstance(op, Fork):
            known = len(self.page_lists[op.parent]) * self.layout.page_tokens
            return not self.page_lists[op.seq] and op.num_tokens <= known
        if isinstance(op, SwapIn):
            return op.seq in self.swapped
        return isinstance(op, Convert) and op.seq in self.page_lists

    def apply(self, plan: MemoryPlan) -> int:
        assert plan.version == self.version
        for op in plan.ops:
            if isinstance(op, Fork):
                shared = op.num_tokens // self.layout.page_tokens
                self.page_lists[op.seq] = self.page_lists[op.parent][:shared]
            elif isinstance(op, SwapIn):
                for _ in range(self.swapped.pop(op.seq)):
                    self.page_lists[op.seq].append(self.num_made)
                    self.num_made += 1
            elif isinstance(op, Convert):
                self.regimes[op.seq] = op.regime
        for growth in plan.growths:
            pages = self.page_lists[growth.seq]
            while len(pages) < self._pages_for(growth.num_tokens):
                pages.append(self.num_made)
                self.num_made += 1
            self.firsts[growth.seq] = growth.first_token
        assert self.available_pages() >= 0
        self.version += 1
        return self.version

    def swap_out(self, seqs: Sequence[int]) -> bool:
        pages = {page for seq in seqs for page in self.page_lists[seq]}
        if len(pages) + sum(self.swapped.values()) > self.swap_pages:
            return False
        for seq in seqs:
            self.swapped[seq] = len(self.page_lists[seq])
            self.page_lists[seq] = []
        self.version += 1
        return True

    @property
    def is_copying(self) -> bool:
        return False

    def finish_copies(self) -> bool:
        return False

    def without_waiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def release(self, seq: int) -> None:
        self.swapped.pop(seq, None)
        del self.page_lists[seq]
        self.version += 1

    def available_pages(self) -> int:
        used = {page for pages in self.page_lists.values() for page in pages}
        return self.limit_pages - self.lost_pages - self.held_pages - len(used)

    def settle(self) -> bool:
        held, self.held_pages = self.held_pages, 0
        return held > 0

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.layout.page_tokens)
