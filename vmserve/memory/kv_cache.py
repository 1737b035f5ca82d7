"""KV memory alone, for any serving framework: the vAttention-style API over torch tensors."""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, Self, get_args

import torch

from vmserve.errors import ConfigurationError, OutOfMemoryError
from vmserve.memory.base import Fork, Growth, MemoryPlan, Shortfall
from vmserve.memory.manager import MemoryManager, MemoryOptions
from vmserve.memory.tensors import arena_tensors, contiguous_view, safe_view
from vmserve.numbers.sizes import format_size

if TYPE_CHECKING:
    from types import TracebackType

    from vmserve.memory.base import MemoryStats
    from vmserve.memory.device import MemoryDevice
    from vmserve.memory.layout import KVLayout

__all__ = ["KVCache"]

_ZeroPages = Literal["always", "tenant", "never"]
#: Most slots, above any machine's: their bookkeeping is allocated at once.
_MAX_SLOTS: Final = 2**20
#: Bound of the reservation, above the address space of a process.
_MAX_RESERVATION: Final = 2**57


class KVCache:
    """A KV cache whose K and V are ordinary contiguous tensors, backed by pages on demand.

    Every sequence has a *slot*: ``keys[layer][slot]`` is ``[max_len, kv_heads, head_dim]`` with
    ordinary strides, so that any attention kernel works on it unmodified. Only positions given to
    :meth:`step` have memory behind them. Kernels that take block tables can read the same pages
    through :meth:`paged_tensors` and :meth:`block_tables`.

    >>> import torch
    >>> from vmserve import KVCache, plan_layout
    >>> layout = plan_layout(2, kv_heads=2, head_dim=64, dtype=torch.float32, granularity=4096)
    >>> with KVCache(layout, num_slots=4, max_len=1024, limit_bytes=64 << 20) as cache:
    ...     slot = cache.alloc_slot()
    ...     missing = cache.step({slot: 3})  # positions 0, 1 and 2 can be used from here on
    ...     keys, values = cache.tensors()[0]
    ...     keys[slot, :3] = 1.0
    ...     twin = cache.fork(slot, 3)  # shares whole pages, copies the last one
    ...     (missing, keys.shape, float(keys[twin, :3].sum()))
    (0, torch.Size([4, 1024, 2, 64]), 384.0)

    NOTE: touching a position that is not mapped (also by printing or slicing a whole tensor) ends
    the process with a segmentation fault, and so does writing to positions that a fork shares.
    ``tensors(unmapped="zero")`` can be read everywhere. After :meth:`close`, tensors may be dropped
    at any time; the memory is freed with the last of them.

    The cache belongs to its process. In a fork of the process calls raise ``ValueError``, but its
    tensors show, and write to, the parent's memory: start worker processes with the spawn method.

    Several threads may call one cache, each for slots of its own. Calls wait for each other.

    ``driver``: "host", "cuda", or the path of a driver's shared library (drivers_ext/README.md).
    With "cuda" the tensors are the GPU's (plan the layout with ``CUDA_GRANULARITY``), and kernels
    that use them must run on the stream that was torch's current one when the cache was made. Each
    call that changes memory is ordered after the kernels launched before it. Pages that they may
    read are not unmapped before they are done.

    Raises :class:`ConfigurationError` for arguments out of their ranges and if ``limit_bytes``
    holds no page, and :class:`DriverError` if ``num_slots`` times ``max_len`` cannot be reserved.
    """

    def __init__(
        self,
        layout: KVLayout,
        driver: str | MemoryDevice = "host",
        *,
        num_slots: int,
        max_len: int,
        limit_bytes: int,
        read_slack_tokens: int = 0,
        zero_pages: _ZeroPages = "always",
    ) -> None:
        num_slots = _checked("num_slots", num_slots, 1, _MAX_SLOTS)
        max_len = _checked("max_len", max_len, 1, _MAX_RESERVATION)
        limit_bytes = _checked("limit_bytes", limit_bytes, 0, _MAX_RESERVATION)
        read_slack_tokens = _checked("read_slack_tokens", read_slack_tokens, 0, _MAX_RESERVATION)
        if zero_pages not in get_args(_ZeroPages):
            raise ConfigurationError(
                f"zero_pages: {zero_pages!r} is not one of {', '.join(get_args(_ZeroPages))}"
            )
        if layout.dtype.has_scales:
            raise ConfigurationError(
                f"a KVCache has tensors of numbers, and {layout.dtype} rows have scales beside "
                "them: plan the layout with another dtype"
            )
        widest = max(part.page_bytes for part in layout.parts)
        reserved = num_slots * layout.pages_for(max_len + read_slack_tokens) * widest
        if reserved > _MAX_RESERVATION:
            raise ConfigurationError(
                f"{num_slots} slots of {max_len} tokens are {format_size(reserved)} of addresses "
                "for each group of layers, more than there are: lower num_slots or max_len"
            )
        self.layout = layout
        self.num_slots = num_slots
        self.max_len = max_len
        self._pages_per_slot = layout.pages_for(max_len + read_slack_tokens)
        #: Sequences by slot.
        self._seqs: dict[int, int] = {}
        self._tenants: dict[int, int] = {}
        #: The epoch of the last change: kernels that use its result are launched after it.
        self._epoch = 0
        #: Guards the dict above, and the memory between a plan and its apply.
        self._lock = threading.Lock()
        # Blocks are whole pages, as kernels with block tables expect here.
        self._memory = MemoryManager(
            dataclasses.replace(layout, block_tokens=layout.page_tokens),
            num_slots=num_slots,
            max_len=max_len,
            limit_bytes=limit_bytes,
            options=MemoryOptions(
                read_slack_tokens=read_slack_tokens,
                zero_pages=zero_pages,
                driver=driver,
                # Other frameworks write positions again, for example rejected drafts.
                seal_read_only=False,
            ),
        )

    def tensors(
        self, unmapped: Literal["fault", "zero"] = "fault"
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """``(K, V)`` per layer, each ``[num_slots, max_len, kv_heads, head_dim]``.

        With ``unmapped="zero"`` the tensors can be read everywhere (zero if nothing is mapped) and
        written nowhere: safe to print, slice and compare.
        """
        if unmapped not in ("fault", "zero"):
            raise ValueError(f"unmapped is {unmapped!r}: use 'fault' or 'zero'")
        view = (contiguous_view if unmapped == "fault" else safe_view)(self._memory)
        return list(zip(view.keys, view.values, strict=True))

    def paged_tensors(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """``(K, V)`` per layer over all pages, each ``[pages, page_tokens, kv_heads, head_dim]``.

        Rows that no :meth:`block_tables` entry names must not be touched.
        """
        return list(zip(*arena_tensors(self._memory), strict=True))

    def alloc_slot(self, tenant: int = 0) -> int | None:
        """Take an empty slot; None if all are taken."""
        with self._exclusive():
            return self._start(tenant, [])

    def _exclusive(self) -> threading.Lock:
        """The lock, after a check of the process: in a fork it may be held for ever."""
        self._memory.require_usable()
        return self._lock

    def _start(self, tenant: int, forks: list[tuple[int, int]]) -> int | None:
        """Take a slot for a new sequence: empty, or a fork of (parent, length)."""
        self._follow()
        seq = self._memory.open(tenant=tenant)
        if seq is None:
            return None
        slot = None
        try:
            ops = [Fork(seq, parent, length) for parent, length in forks]
            plan = self._memory.plan([Growth(seq, 0)], ops)
            if isinstance(plan, MemoryPlan):
                self._apply(plan)
                slot = int(self._memory.slots([seq])[0])
            elif plan.missing_pages:
                raise OutOfMemoryError(
                    f"the fork needs {plan.needed_pages} pages for its copy, "
                    f"{plan.available_pages} can be had: free a slot or raise the limit"
                )
            elif plan.missing_mappings:
                raise OutOfMemoryError(
                    f"the fork needs {plan.needed_mappings} memory mappings, "
                    f"{plan.available_mappings} can be had: free a slot or raise vm.max_map_count"
                )
        finally:
            if slot is None:
                self._memory.release(seq)
        if slot is not None:
            self._seqs[slot] = seq
            self._tenants[slot] = tenant
        return slot

    def free_slot(self, slot: int) -> None:
        """Free a slot, and its pages unless a fork shares them.

        Pages stay mapped until they are needed elsewhere: the slot's next sequence finds them
        there. Pages that only one slot has from now on can be written again. Raises ``ValueError``
        for a slot that is not allocated.
        """
        with self._exclusive():
            seq = self._seq(slot)
            # Kernels may have been launched since the last change ended: an epoch of their own
            # protects what they read.
            nothing = self._memory.plan(())
            assert isinstance(nothing, MemoryPlan)
            self._apply(nothing)
            self._follow()
            self._memory.release(seq)
            del self._seqs[operator.index(slot)]

    def _seq(self, slot: int) -> int:
        number = _whole("slot", slot)
        if number not in self._seqs:
            raise ValueError(f"slot {number} is not allocated")
        return self._seqs[number]

    def _apply(self, plan: MemoryPlan) -> None:
        self._epoch = self._memory.apply(plan)

    def _follow(self) -> None:
        """Whatever uses the last change has been launched by now; on the host it is done."""
        self._memory.launched(self._epoch)

    def step(self, lengths: Mapping[int, int] | Sequence[int]) -> int:
        """Make the first ``length`` positions of every slot usable; returns how many pages are
        missing.

        ``lengths``: slot -> length, or one length per slot from slot 0 on (0: leave alone). 0 means
        that everything is mapped. Otherwise *nothing* was, and that many pages must become free or
        the limit be raised (or vm.max_map_count, if memory mappings are short). Slots never shrink.

        Raises ``ValueError`` for a slot that is not allocated or a length above ``max_len``,
        ``TypeError`` for one that is not an integer, :class:`OutOfMemoryError` if the system has
        less memory than the limit promises.
        """
        pairs = lengths.items() if isinstance(lengths, Mapping) else enumerate(lengths)
        with self._exclusive():
            asked = [(slot, _whole(f"the length of slot {slot}", length)) for slot, length in pairs]
            growths = [Growth(self._seq(slot), length) for slot, length in asked if length != 0]
            self._follow()
            plan = self._memory.plan(growths)
            if isinstance(plan, Shortfall):
                # A page in a slot takes at most one mapping in each group.
                by_mappings = -(-plan.missing_mappings // self.layout.num_groups)
                return max(plan.missing_pages, by_mappings)
            self._apply(plan)
            return 0

    def block_tables(self) -> torch.Tensor:
        """Page ids of every slot in order: int32 ``[num_slots, pages_per_slot]``, -1 without a
        page."""
        tables = torch.full((self.num_slots, self._pages_per_slot), -1, dtype=torch.int32)
        with self._exclusive():
            for slot, seq in self._seqs.items():
                pages = self._memory.blocks(seq)
                tables[slot, : len(pages)] = torch.from_numpy(pages)
        return tables

    def fork(self, slot: int, length: int) -> int | None:
        """Take a slot that starts with the first ``length`` positions of ``slot``.

        They must be written. Whole pages are shared, and read-only while several slots have them
        (on a GPU only in the fork); the last, partial page is copied. None if all slots are taken.
        Raises :class:`OutOfMemoryError` if there is no page for the copy.
        """
        with self._exclusive():
            return self._start(self._tenants.get(slot, 0), [(self._seq(slot), length)])

    def set_limit(self, limit_bytes: int) -> None:
        """Change the limit of the pool.

        Unused pages above it go back to the system at once, others as slots are freed.
        """
        with self._exclusive():
            self._follow()
            self._memory.set_limit(limit_bytes)

    def trim(self, keep_pages: int = 0) -> int:
        """Give unused pages above ``keep_pages`` back to the system; returns how many."""
        with self._exclusive():
            self._follow()
            self._memory.wait()
            return self._memory.trim(keep_pages, drop_idle=True)

    def stats(self) -> MemoryStats:
        return self._memory.stats()

    def close(self) -> None:
        """Let every later call raise ``ValueError``; the memory is freed with its last tensor."""
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _whole(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: {value!r} is not an integer") from None


def _checked(name: str, value: object, least: int, most: int) -> int:
    try:
        number = _whole(name, value)
    except TypeError as error:
        raise ConfigurationError(str(error)) from None
    if not least <= number <= most:
        raise ConfigurationError(f"{name}: {number} is not between {least} and {most}")
    return number
