"""The engine's KV memory over the C++ core: slots of contiguous virtual memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from vmserve import _core
from vmserve.attention.base import ContiguousView
from vmserve.config import format_size
from vmserve.errors import ConfigurationError
from vmserve.memory.base import Growth, MemoryPlan, MemoryStats, Shortfall
from vmserve.memory.tensors import layer_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from vmserve.memory.layout import KVLayout

__all__ = ["VirtualKVMemory"]

_ZERO_POLICIES = {
    "always": _core.ZeroPolicy.ALWAYS,
    "tenant": _core.ZeroPolicy.TENANT,
    "never": _core.ZeroPolicy.NEVER,
}
#: The pool grows by this much at a time: taking memory from the system is the slow part
#: of a step that grows, and a page at a time would pay its fixed cost every time.
_GROW_BYTES = 8 << 20


class VirtualKVMemory:
    """Implements :class:`vmserve.memory.base.KVMemory` on the host.

    ``limit_bytes`` caps the pool and can be changed while serving, up to
    ``max_limit_bytes`` (default: the machine's memory, if that is more than the limit),
    which sizes the address space. ``read_slack_tokens``: how far past a sequence's length
    kernels may read; that much stays mapped behind it. ``limits`` and ``wrap_driver`` are
    seams for tests: what the system says it has, and a driver around the real one.

    Raises :class:`ConfigurationError` when not one page fits in the limit, and
    :class:`DriverError` when the address space cannot be reserved.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_slots: int,
        max_len: int,
        limit_bytes: int,
        max_limit_bytes: int | None = None,
        read_slack_tokens: int = 0,
        zero_pages: Literal["always", "tenant", "never"] = "always",
        limits: _core.SystemLimits | None = None,
        wrap_driver: Callable[[_core.PageDriver], _core.PageDriver] | None = None,
    ) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self.max_len = max_len
        limit_pages = _pages(layout, limit_bytes)
        max_bytes = max(limit_bytes, max_limit_bytes or _physical_bytes())
        max_pages = max(limit_pages, layout.num_pages(max_bytes))
        driver: _core.PageDriver = _core.HostDriver(
            layout.page_bytes, layout.num_groups * max_pages, limits=limits or _core.SystemLimits()
        )
        if wrap_driver is not None:
            driver = wrap_driver(driver)
        self._core = _core.KVMemory(
            driver,
            num_groups=layout.num_groups,
            page_tokens=layout.page_tokens,
            token_bytes=layout.token_stride,
            num_slots=num_slots,
            max_len=max_len,
            read_slack=read_slack_tokens,
            limit_pages=limit_pages,
            max_pages=max_pages,
            grow_pages=max(1, min(_GROW_BYTES, limit_bytes // 8) // layout.total_page_bytes),
            zero_policy=_ZERO_POLICIES[zero_pages],
        )

    def alloc_slot(self, tenant: int = 0) -> int | None:
        """The lowest empty slot, or None when all are taken."""
        return self._core.alloc_slot(tenant)

    def plan(self, growths: Sequence[Growth]) -> MemoryPlan | Shortfall:
        """Read-only: what the growths would take.

        Raises ``ValueError`` for a slot that is not allocated or tokens above ``max_len``.
        """
        needed, available, version = self._core.plan(_tuples(growths))
        if needed > available:
            return Shortfall(needed_pages=needed, available_pages=available)
        return MemoryPlan(growths=tuple(growths), needed_pages=needed, version=version)

    def apply(self, plan: MemoryPlan) -> None:
        """Map what the plan needs, all of it or nothing.

        Raises ``ValueError`` for a stale plan, :class:`OutOfMemoryError` when the system has
        less memory than the limit promises, :class:`DriverError` when it refuses a call.
        """
        self._core.apply(_tuples(plan.growths), plan.version)

    def release(self, slot: int) -> None:
        """Empty the slot; its pages become free where no other slot shares them.

        Never fails for the system's sake: what cannot be unmapped now is quarantined
        (:attr:`quarantined_pages`) and tried again by every later call that mutates.
        """
        self._core.release(slot)

    def fork(self, slot: int, num_tokens: int) -> int | None:
        """A new slot with the first ``num_tokens`` of ``slot``, or None when all are taken.

        Those tokens must be written: whole pages are shared and read-only in both slots from
        here on, the last partial page is copied.
        Raises :class:`OutOfMemoryError` when the copy finds no page.
        """
        return self._core.fork_slot(slot, num_tokens)

    def trim(self, keep_pages: int = 0) -> int:
        """Give free pages above ``keep_pages`` back to the system; returns how many."""
        return self._core.trim(keep_pages)

    def set_limit(self, limit_bytes: int) -> None:
        """Change the cap. What is free above it goes back at once, the rest when released."""
        self._core.set_limit(_pages(self.layout, limit_bytes))

    def block_table(self, slot: int) -> NDArray[np.int32]:
        """The slot's page ids, in order: ``[pages]``."""
        return self._core.block_table(slot)

    def slot_length(self, slot: int) -> int:
        """The tokens that the slot was grown to."""
        return self._core.slot_length(slot)

    def view(self) -> ContiguousView:
        """K and V per layer, ``[slots, max_len, kv_heads, head_dim]``, over the slots."""
        groups = range(self.layout.num_groups)
        keys, values = layer_tensors(
            self.layout, [self._core.slots_buffer(g) for g in groups], self.max_len
        )
        return ContiguousView(keys=keys, values=values)

    def safe_view(self) -> ContiguousView:
        """Like :meth:`view`, but reads of what is not mapped give zero. Writing anywhere traps."""
        groups = range(self.layout.num_groups)
        keys, values = layer_tensors(
            self.layout, [self._core.shadow_buffer(g) for g in groups], self.max_len
        )
        return ContiguousView(keys=keys, values=values)

    def arena_tensors(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """K and V per layer over the arena, ``[pages, page_tokens, kv_heads, head_dim]``."""
        groups = range(self.layout.num_groups)
        return layer_tensors(
            self.layout,
            [self._core.arena_buffer(g) for g in groups],
            self.layout.page_tokens,
        )

    def stats(self) -> MemoryStats:
        stats = self._core.stats()
        return MemoryStats(
            **{name: getattr(stats, name) for name in MemoryStats.__dataclass_fields__}
        )

    @property
    def quarantined_pages(self) -> int:
        """Pages that a failed undo holds back; 0 on a healthy system."""
        return self._core.stats().quarantined_pages

    @property
    def last_error(self) -> str:
        """Why pages were quarantined last; empty if they never were."""
        return self._core.last_error()

    def check(self) -> None:
        """Verify the conservation laws; raises ``AssertionError`` naming the one broken."""
        self._core.check()

    def close(self) -> None:
        """Every later call raises ``ValueError``; the memory goes with its last tensor.

        Tensors that are still held stay as they are: what was mapped can be touched, the
        rest is a fault as before.
        """
        self._core.close()


def _tuples(growths: Sequence[Growth]) -> list[tuple[int, int]]:
    return [(growth.slot, growth.num_tokens) for growth in growths]


def _pages(layout: KVLayout, limit_bytes: int) -> int:
    pages = layout.num_pages(limit_bytes)
    if pages < 1:
        raise ConfigurationError(
            f"a KV cache of {format_size(limit_bytes)} does not hold one page of "
            f"{format_size(layout.total_page_bytes)} ({layout.page_tokens} tokens of all layers): "
            "raise --kv-cache-memory or lower --kv-page-size"
        )
    return pages


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
