"""Prefixes that stay in the cache on request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vmserve.errors import InvalidRequestError
from vmserve.memory.base import Attach, MemoryPlan, Regime
from vmserve.numbers.sizes import size_to_set
from vmserve.types import PinnedPrefix

if TYPE_CHECKING:
    from collections.abc import Collection

    from vmserve.config import ResolvedConfig
    from vmserve.memory.longest import LongestSequence
    from vmserve.memory.manager import MemoryManager

__all__ = ["MAX_PINNED_PREFIXES", "PinnedPrefixes"]

MAX_PINNED_PREFIXES = 64


class PinnedPrefixes:
    """Pinned prefixes. Each is a sequence in memory that references the blocks and never runs."""

    def __init__(
        self, memory: MemoryManager, resolved: ResolvedConfig, longest: LongestSequence
    ) -> None:
        self._memory = memory
        self._resolved = resolved
        self._longest = longest
        #: Handle -> the sequence in memory that keeps the blocks.
        self._held: dict[int, int] = {}
        self._num_handles = 0

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, token_ids: list[int], salt: bytes, tenant: int) -> PinnedPrefix:
        """Pin a prefix; raises as :meth:`vmserve.engine.engine.LLMEngine.hold_prefix`."""
        if not self._resolved.prefix_caching:
            raise InvalidRequestError(
                "prefixes cannot be pinned without --enable-prefix-caching", "prompt"
            )
        if len(self._held) >= MAX_PINNED_PREFIXES:
            raise InvalidRequestError(
                f"{MAX_PINNED_PREFIXES} prefixes are pinned already: unpin one", "prompt"
            )
        # A match never includes the last token; an extra one lets it cover the whole prefix.
        memory_id = self._memory.open(
            [*token_ids, 0], regime=Regime.PAGED, tenant=tenant, salt=salt
        )
        if memory_id is None:
            raise InvalidRequestError("too many sequences are open: try again", "prompt")
        hit = 0
        try:
            hit = self._attach(memory_id, len(token_ids))
        finally:
            if not hit:
                self._memory.release(memory_id)
        handle = self._num_handles
        self._num_handles += 1
        self._held[handle] = memory_id
        return PinnedPrefix(handle, hit)

    def release(self, handle: int) -> None:
        """Unpin. Raises ``ValueError`` for an unknown handle."""
        if handle not in self._held:
            raise ValueError(f"no prefix is pinned with the handle {handle}")
        self._memory.release(self._held.pop(handle))

    def clear(self) -> None:
        for handle in list(self._held):
            self.release(handle)

    def keep(self, handles: Collection[int]) -> None:
        """Release all others."""
        for handle in self._held.keys() - handles:
            del self._held[handle]

    @property
    def memory_ids(self) -> Collection[int]:
        """The sequences in memory that keep the blocks."""
        return self._held.values()

    @property
    def num_pages(self) -> int:
        """What holds pinned blocks and states, in whole pages."""
        return self._count_pages(*self._held.values())

    def _count_pages(self, *memory_ids: int) -> int:
        return -(-self._memory.held_bytes(memory_ids) // self._memory.layout.total_page_bytes)

    def _attach(self, memory_id: int, num_tokens: int) -> int:
        """Reference the cached blocks of a prefix; returns how many tokens they hold."""
        memory, resolved = self._memory, self._resolved
        if memory.restore(memory_id):
            memory.finish_restores()
        hit = memory.match(memory_id)
        if hit == 0:
            raise InvalidRequestError(
                f"nothing of the {num_tokens} tokens is in the prefix cache: a prefix is pinned "
                f"in whole blocks of {resolved.block_tokens} tokens, once computed",
                "prompt",
            )
        plan = memory.plan([], [Attach(memory_id, hit)])
        if not isinstance(plan, MemoryPlan):  # while more is in use than a lowered limit allows
            raise InvalidRequestError(
                f"{hit} tokens cannot be pinned while the KV cache lacks "
                f"{plan.missing_pages} pages: try again when requests have ended",
                "prompt",
            )
        memory.launched(memory.apply(plan))
        needed = self._longest.num_pages
        left = memory.limit_pages - self._count_pages(memory_id, *self._held.values())
        if left < needed:
            room = (memory.limit_pages - left + needed) * memory.layout.total_page_bytes
            raise InvalidRequestError(
                f"with {hit} tokens pinned {left} pages are left, and a sequence of "
                f"{resolved.max_model_len} tokens needs {needed}: raise --kv-cache-memory, or this "
                f"model's kv_floor in a pool, to {size_to_set(room)}",
                "prompt",
            )
        return hit
