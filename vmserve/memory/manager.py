"""The engine's KV memory over the C++ core: one pool of pages, two views of them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vmserve import _core
from vmserve.errors import ConfigurationError, DriverError, OutOfMemoryError
from vmserve.memory.base import (
    Attach,
    Checkpoints,
    Convert,
    Fork,
    Health,
    MemoryPlan,
    MemoryStats,
    Regime,
    Shortfall,
    SlotUse,
    SwapIn,
    SwapOut,
)
from vmserve.memory.device import MemoryDevice, memory_device
from vmserve.memory.layout import LayerKind
from vmserve.numbers.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from vmserve.memory.base import Growth, MemoryOp
    from vmserve.memory.layout import KVLayout, LayerPages

__all__ = ["MemoryManager", "MemoryOptions"]

_ZERO_POLICIES = {
    "always": _core.ZeroPolicy.ALWAYS,
    "tenant": _core.ZeroPolicy.TENANT,
    "never": _core.ZeroPolicy.NEVER,
}
_VIEWS = {Regime.VIRTUAL: _core.View.VIRTUAL, Regime.PAGED: _core.View.PAGED}
_REGIMES = {view: regime for regime, view in _VIEWS.items()}
_MAPPERS = {
    "off": _core.MapperMode.OFF,
    "manual": _core.MapperMode.MANUAL,
    "thread": _core.MapperMode.THREAD,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """How the pool behaves. The defaults are those of a pool without background work.

    ``read_slack_tokens``: how far past a sequence's length kernels may read; that much stays mapped
    after it. ``max_limit_bytes`` sizes the address space: the limit can be raised up to there
    (default: the machine's memory, if that is more than the limit).
    """

    max_limit_bytes: int | None = None
    read_slack_tokens: int = 0
    zero_pages: Literal["always", "tenant", "never"] = "always"
    prefix_caching: bool = False
    #: With layers that keep a state: tokens between two states in the prefix cache, rounded up to
    #: whole blocks.
    checkpoint_tokens: int = 512
    #: Keep page 0 zero for ever: unused entries of block tables are block 0.
    null_page: bool = False
    #: Keep a finished sequence's slot mapped until its pages are needed.
    deferred_reclamation: bool = True
    #: Make pages that are written for good read-only in slots, so that a stray write is a trap. The
    #: device must be able to change access under a running step.
    seal_read_only: bool = True
    swap_bytes: int = 0
    mapper: Literal["off", "manual", "thread"] = "off"
    #: Tokens that the mapper maps ahead of a growing sequence.
    lookahead_tokens: int = 0
    #: Unused slots that are kept mapped, each ``eager_tokens`` long. With 0 tokens: up to this
    #: many, as many and as long as new requests took lately.
    eager_slots: int = 0
    eager_tokens: int = 0
    #: Free memory made at start and kept ready by the mapper, in bytes; at most an eighth of the
    #: limit.
    ready_bytes: int = 0
    #: Share of the pool below which parked slots are unmapped.
    reclaim_share: float = 0.10
    #: "host", "cuda", the path of a driver's shared library, or the device itself.
    driver: str | MemoryDevice = "host"


class MemoryManager:
    """Implements :class:`vmserve.memory.base.KVMemory`.

    ``limit_bytes`` limits the pool and can be changed while serving. ``num_seqs``: sequences that
    can be open (default: one for each slot). ``kinds``: kinds of layers that get pages of their own
    from the pool, the first of which sees all positions (none: one that has all layers); several
    only with a layout whose groups divide the layers of each, K next to V. States of the layout are
    a kind of their own, after these. ``limits`` and ``wrap_driver`` are seams for tests:
    the system's limits, and a driver around the real one.

    Raises :class:`ConfigurationError` if not one page fits in the limit, and :class:`DriverError`
    if the address space cannot be reserved.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        num_slots: int,
        max_len: int,
        limit_bytes: int,
        num_seqs: int | None = None,
        kinds: Sequence[LayerKind] = (),
        options: MemoryOptions | None = None,
        limits: _core.SystemLimits | None = None,
        wrap_driver: Callable[[_core.PageDriver], _core.PageDriver] | None = None,
    ) -> None:
        options = options or MemoryOptions()
        self.kinds = _all_kinds(layout, kinds)
        #: Those that keep tokens; the one with states, if there is one, is the last of all.
        self.token_kinds = tuple(kind for kind in self.kinds if not kind.has_state)
        #: With a part for each of these.
        self.layout = layout = layout.of_kinds(self.token_kinds)
        self.num_slots = num_slots
        self.max_len = max_len
        self.options = options
        self.limit_pages = _pages(layout, limit_bytes)
        chosen = options.driver
        device = self.device = memory_device(chosen) if isinstance(chosen, str) else chosen
        max_bytes = max(limit_bytes, options.max_limit_bytes or device.total_bytes)
        #: The highest possible limit: the reserved address space.
        self.max_pages = max_pages = max(self.limit_pages, layout.num_pages(max_bytes))
        #: Free pages that are kept ready.
        self.ready_pages = min(options.ready_bytes, limit_bytes // 8) // layout.total_page_bytes
        self._launched_epoch = 0
        self._least_reported = self.limit_pages
        self._may_wait = True
        self._is_copying = False
        self._persists = False

        def described(own: dict[str, Any]) -> dict[str, Any]:
            # Any kind may take the whole pool.
            own_bytes = own["num_groups"] * own["page_bytes"]
            own["max_pages"] = layout.total_page_bytes * max_pages // own_bytes
            num_frames = own["max_pages"] * own["num_groups"]
            driver = device.create_driver(own.pop("page_bytes"), num_frames, limits)
            own["driver"] = driver if wrap_driver is None else wrap_driver(driver)
            return own

        of_kinds = [
            described(self._of_tokens(*each))
            for each in zip(self.token_kinds, layout.parts, strict=True)
        ]
        if layout.state_bytes:
            of_kinds.append(described(self._of_states()))
        can = of_kinds[0]["driver"].capabilities
        self._is_asynchronous: bool = can.asynchronous
        self._has_host_memory: bool = can.host_memory
        self._copies_in_background: bool = can.copy_stream
        self._core = _core.KVMemory(
            of_kinds,
            self.limit_pages,
            block_tokens=layout.block_tokens,
            max_seqs=num_seqs or num_slots,
            num_slots=num_slots,
            max_len=max_len,
            read_slack=options.read_slack_tokens,
            zero_policy=_ZERO_POLICIES[options.zero_pages],
            prefix_caching=options.prefix_caching,
            deferred_reclamation=options.deferred_reclamation,
            seal_read_only=options.seal_read_only,
            access_under_readers=device.seals_under_readers,
            mapper=_MAPPERS[options.mapper],
            lookahead_tokens=options.lookahead_tokens,
            eager_slots=options.eager_slots,
            eager_pages=layout.pages_for(options.eager_tokens),
            reclaim_share=options.reclaim_share,
        )

    @property
    def _swap_bytes(self) -> int:
        """Host memory for tokens, and as much for states if there are any."""
        return self.options.swap_bytes // (2 if self.layout.state_bytes else 1)

    def _of_tokens(self, kind: LayerKind, part: LayerPages) -> dict[str, Any]:
        """What a kind that keeps tokens has of its own."""
        layout, options = self.layout, self.options
        block_bytes = layout.total_page_bytes // layout.blocks_per_page
        grow_bytes = min(self.device.grow_bytes, self.limit_bytes // 8)
        return {
            "window": kind.kept_tokens or 0,
            "num_groups": part.num_groups,
            "page_bytes": part.page_bytes,
            "token_bytes": part.token_stride,
            "blocks_per_page": layout.blocks_per_page,
            "grow_pages": max(1, grow_bytes // layout.total_page_bytes),
            "ready_pages": self.ready_pages,
            "null_page": options.null_page,
            "swap_blocks": self._swap_bytes // block_bytes,
        }

    def _of_states(self) -> dict[str, Any]:
        """What the kind with states has of its own."""
        layout = self.layout
        return {
            "num_groups": 1,
            "page_bytes": layout.state_bytes,
            "token_bytes": 1,
            "blocks_per_page": 1,
            "state_bytes": layout.state_bytes,
            "checkpoint_tokens": self._checkpoint_tokens,
            "swap_blocks": self._swap_bytes // layout.state_bytes,
        }

    # -- sequences ----------------------------------------------------------------------

    def open(
        self,
        tokens: Sequence[int] = (),
        *,
        regime: Regime = Regime.VIRTUAL,
        tenant: int = 0,
        salt: bytes = b"",
    ) -> int | None:
        """Open an empty sequence that knows ``tokens``; None if no more can be open.

        The prefix cache shares between sequences of equal tenant, salt and tokens. Without tokens
        nothing is matched or published.
        """
        return self._core.open(tenant, _VIEWS[regime], salt, tokens)

    def match(self, seq: int) -> int:
        return self._core.match(seq)

    # -- prefixes that outlive the process ----------------------------------------------

    def block_bytes(self) -> list[int]:
        """Bytes of a block, or of a state, of each kind of layers."""
        layout = self.layout
        sizes = [part.total_page_bytes // layout.blocks_per_page for part in layout.parts]
        return [*sizes, layout.state_bytes] if layout.state_bytes else sizes

    @property
    def can_persist(self) -> bool:
        """Whether blocks can be copied to host memory."""
        return self._has_host_memory

    def persist_to(self, stores: Sequence[_core.PageStore]) -> None:
        """Write published blocks to a store for each kind of layers, and read them back."""
        self._core.persist_to(stores)
        self._persists = True

    def restore(self, seq: int, attaching: Sequence[Attach] = ()) -> bool:
        return self._persists and self._core.restore(seq, _op_tuples(attaching))

    def finish_restores(self) -> None:
        self._core.finish_restores()

    def write_when_idle(self) -> None:
        """Write what is published while nothing runs, until the next sequence is opened."""
        if self._persists:
            self._core.write_when_idle()

    def flush(self, seconds: float) -> bool:
        """Wait until everything published is written; False if it took longer."""
        return not self._persists or self._core.flush(seconds)

    def persist_messages(self) -> list[str]:
        """Why something was not kept or found; each reason is reported once."""
        messages = []
        while self._persists and (message := self._core.persist_message()):
            messages.append(message)
        return messages

    def plan(
        self, growths: Sequence[Growth] | NDArray[np.int64], ops: Sequence[MemoryOp] = ()
    ) -> MemoryPlan | Shortfall:
        """Plan the growths, and the ops before them, without changing anything.

        Growths as an array are int64 ``[growths, 3]``, or ``[growths, 4]`` with drafts; it belongs
        to the plan from now on.
        Raises ``ValueError`` for a sequence that is not open or tokens above ``max_len``.
        """
        rows = _rows(growths)
        plan = self._core.plan_step(rows, _op_tuples(ops))
        for catch_up in (self._catch_up, self.finish_copies):
            if not plan.fits and plan.waiting_pages and self._may_wait and catch_up():
                plan = self._core.plan_step(rows, _op_tuples(ops))
        if plan.fits:
            return MemoryPlan(rows, tuple(ops), plan.needed_pages, plan.version)
        return Shortfall(
            needed_pages=plan.needed_pages,
            available_pages=plan.available_pages,
            waiting_pages=plan.waiting_pages,
            excess_pages=plan.excess_pages,
            missing_slots=plan.missing_slots,
            missing_swap_blocks=plan.missing_swap_blocks,
            lost_prefixes=plan.lost_prefixes,
            needed_mappings=plan.needed_mappings,
            available_mappings=plan.available_mappings,
        )

    def apply(self, plan: MemoryPlan) -> int:
        """Execute a plan, all of it or nothing, and begin an epoch; returns its number.

        Raises ``ValueError`` for a stale plan, :class:`OutOfMemoryError` if the system has less
        memory than the limit promises, :class:`DriverError` if it refuses a call.
        """
        try:
            return self._core.apply_step(plan.rows, plan.version, _op_tuples(plan.ops))
        except OutOfMemoryError:
            # Torch keeps memory that it freed; on a device both use the same memory.
            if not self.device.release_unused():
                raise
        again = self.plan(plan.rows, plan.ops)
        if not isinstance(again, MemoryPlan):
            raise OutOfMemoryError(
                f"the plan needs {again.needed_pages} pages, {again.available_pages} can be had "
                "since the device has no more memory: free device memory"
            )
        return self._core.apply_step(again.rows, again.version, _op_tuples(again.ops))

    def slots(self, seqs: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int32]:
        return self._core.slots(seqs)

    def launched(self, epoch: int) -> None:
        """Note that the epoch's work is with the device; it is complete when that is done.

        On the host it is done by now. Does not wait: later calls find out when held pages are free.
        """
        if not self._is_asynchronous:
            self._core.complete(epoch)
            return
        try:
            self._core.launched(epoch)
        except DriverError as error:
            if error.sticky:
                raise
            self.device.wait()  # instead of a mark
            self._core.complete(epoch)
        self._launched_epoch = epoch

    def wait(self) -> None:
        """Wait for launched steps and for copies to host memory, which hold pages back."""
        self._catch_up()
        self.finish_copies()

    @contextmanager
    def without_waiting(self) -> Iterator[None]:
        self._may_wait = False
        try:
            yield
        finally:
            self._may_wait = True

    def _catch_up(self) -> bool:
        """Wait for the running steps; False if one is begun that the device does not have yet."""
        begun = self._core.begun_epoch
        if not self._is_asynchronous or self._launched_epoch < begun:
            return False
        self.device.wait()
        self._core.complete(begun)
        return True

    def complete(self, epoch: int) -> None:
        """Note that the step of this epoch, and those before, have computed: keep what they
        wrote."""
        self._core.complete(epoch)

    def abandon(self, epoch: int) -> None:
        """End these epochs and discard what they wrote: nothing of it is cached."""
        self._core.abandon_epoch(epoch)

    def start_over(self, keep: Collection[int] = ()) -> None:
        """Close all sequences but those of ``keep``, and discard what running epochs write.

        For an owner that has lost track of what it opened and began. The device must have ended
        its work.
        """
        self._may_wait = True
        if self._core.begun_epoch > self._core.completed_epoch:
            self.abandon(self._core.begun_epoch)
        for seq in self.open_seqs():
            if seq not in keep:
                self.release(seq)

    def keep(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        self._core.keep(seqs, lengths)

    def append_tokens(
        self, seqs: Sequence[int] | NDArray[np.int64], tokens: Sequence[int] | NDArray[np.int64]
    ) -> None:
        self._core.append_tokens(seqs, tokens)

    def open_seqs(self) -> list[int]:
        """The open sequences, in order."""
        return self._core.open_seqs()

    def release(self, seq: int) -> None:
        """Close the sequence. Its unshared pages become available.

        Its slot stays mapped for the next sequence, its full blocks stay in the prefix cache. Makes
        no system call that could fail.
        """
        self._core.release(seq)

    def swap_out(self, seqs: Sequence[int]) -> bool:
        """Copy the sequences' blocks to host memory and release their pages: all, or nothing.

        False if host memory has no room, or the system refuses. No step may run. If the driver
        copies while kernels run, this does not wait, and the pages become available when the
        copies end. Otherwise they are available at once, because kernels would wait for the copies
        too.
        """
        plan = self.plan((), [SwapOut(seq) for seq in seqs])
        if not isinstance(plan, MemoryPlan):
            return False
        try:
            self.launched(self.apply(plan))
        except (OutOfMemoryError, DriverError):
            return False
        self._is_copying = self._core.is_copying()
        if not self._is_copying:
            self._catch_up()
        return True

    @property
    def is_copying(self) -> bool:
        """Whether copies to host memory run, which hold pages back. Does not wait."""
        if self._is_copying:
            self._is_copying = self._core.is_copying()
        return self._is_copying

    def finish_copies(self) -> bool:
        """Wait for the copies; False if none run, or if the driver refuses to wait."""
        return self._copies_in_background and self._core.finish_copies()

    # -- the pool -----------------------------------------------------------------------

    @property
    def limit_bytes(self) -> int:
        return self.limit_pages * self.layout.total_page_bytes

    @property
    def committed_bytes(self) -> int:
        """Bytes of the pages that the memory has from the system, used or not."""
        return sum(kind.committed_pages * kind.page_bytes for kind in self.kind_stats())

    def available_pages(self) -> int:
        """Pages that growths can get now: free, evictable, or not committed yet.

        Waits for running steps or copies that hold pages back.
        """
        plan = self._core.plan(())
        for catch_up in (self._catch_up, self.finish_copies):
            if plan.waiting_pages and self._may_wait and catch_up():
                plan = self._core.plan(())
        self._least_reported = min(self._least_reported, plan.available_pages)
        return plan.available_pages

    def settle(self) -> bool:
        """Wait for the mapper, which holds pages that it maps or takes back. Returns whether more
        are available than :meth:`available_pages` said since the last wait: it may have ended by
        itself."""
        before = self._least_reported
        self._core.settle_mapper()
        self._least_reported = self.limit_pages
        return self.available_pages() > before

    def trim(self, keep_pages: int = 0, *, drop_idle: bool = False) -> int:
        """Give free pages above ``keep_pages`` back to the system; returns how many.

        With ``drop_idle``, cached and parked pages are evicted for it, oldest first.
        """
        return self._core.trim(keep_pages, drop_idle)

    def give_back(self, num_bytes: int) -> int:
        """Give at least ``num_bytes`` in pages back to the system; returns how many pages.

        Free ones first, then cached and parked ones, oldest first; all of them if there are fewer.
        """
        wanted = -(-num_bytes // self.layout.total_page_bytes)
        given = self.trim(max(0, self.stats().free_pages - wanted))
        if given < wanted:
            stats = self.stats()
            rest = stats.free_pages + stats.idle_pages - (wanted - given)
            given += self.trim(max(0, rest), drop_idle=True)
        return given

    def set_limit(self, limit_bytes: int) -> None:
        """Change the limit. Available pages above it go back at once, others when released."""
        limit_pages = _pages(self.layout, limit_bytes)
        try:
            self._core.set_limit(limit_pages)
        finally:  # the limit holds even if giving back failed
            self.limit_pages = self._core.stats().limit_pages

    def clear_cache(self) -> None:
        """Forget every cached prefix, those that outlive the process too."""
        self._core.clear_cache()

    # -- reading ------------------------------------------------------------------------

    def blocks(self, seq: int) -> NDArray[np.int32]:
        """The sequence's block ids in order, -1 for released ones: ``[blocks]``."""
        return self._core.blocks(seq)

    def held_bytes(self, seqs: Sequence[int]) -> int:
        """Bytes of the pages, of all kinds of layers, in which the sequences' blocks lie."""
        num_bytes = 0
        for kind, stats in enumerate(self.kind_stats() if seqs else ()):
            blocks = (int(block) for seq in seqs for block in self._core.blocks(seq, kind))
            pages = {block // stats.blocks_per_page for block in blocks if block >= 0}
            num_bytes += len(pages) * stats.page_bytes
        return num_bytes

    def block_tables(self, kind: int = 0) -> NDArray[np.int32]:
        """Block tables of all sequences, kept current: int32 ``[num_seqs, blocks]``, 0 beyond the
        end."""
        return self._core.block_tables(kind)

    @property
    def narrowest_window(self) -> int | None:
        """The narrowest window of the kinds; None if there is only one, or all see everything."""
        kept = (kind.kept_tokens for kind in self.kinds)
        return min((each for each in kept if each is not None), default=None)

    @property
    def checkpoints(self) -> Checkpoints | None:
        """Where steps should end, so that prefixes can be cached; None: anywhere."""
        if not (self.layout.state_bytes and self.options.prefix_caching):
            return None
        return Checkpoints(self._checkpoint_tokens, self.layout.block_tokens)

    @property
    def _checkpoint_tokens(self) -> int:
        block = self.layout.block_tokens
        return -(-self.options.checkpoint_tokens // block) * block

    def state_pages(self, seqs: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int32]:
        """The rows of :meth:`state_buffer` with the sequences' states: int32 ``[len(seqs)]``.

        To be asked for each step, after its plan is applied: a step may write to a copy. The first
        step of a sequence starts from zeros, whatever is in the row.
        """
        rows: NDArray[np.int32] = self._core.block_tables(self._state_kind)[seqs, 0]
        return rows

    def state_buffer(self) -> NDArray[np.uint8]:
        """States of all layers, a page per row: uint8 ``[pages, state_bytes]``."""
        return self._core.arena_buffer(0, self._state_kind)

    @property
    def _state_kind(self) -> int:
        assert self.layout.state_bytes
        return len(self.token_kinds)

    def length(self, seq: int) -> int:
        """The tokens that the sequence was grown to."""
        return self._core.length(seq)

    def regime(self, seq: int) -> Regime:
        return _REGIMES[self._core.view(seq)]

    @cached_property
    def _groups(self) -> list[tuple[int, int]]:
        """Of each group of layers: its number in its kind, and the kind."""
        return [
            (group, number)
            for number, part in enumerate(self.layout.parts)
            for group in range(part.num_groups)
        ]

    # For each group uint8 ``[rows, row_bytes]``, those of a kind one after the other, in which
    # :mod:`.tensors` and :mod:`.host_views` find its layers' keys and values. Touching unmapped
    # memory is a fault.

    def slot_buffers(self) -> list[NDArray[np.uint8]]:
        """A slot per row."""
        return [self._core.slots_buffer(*each) for each in self._groups]

    def arena_buffers(self) -> list[NDArray[np.uint8]]:
        """A page per row."""
        return [self._core.arena_buffer(*each) for each in self._groups]

    def shadow_buffers(self) -> list[NDArray[np.uint8]]:
        """A slot per row, read-only, and zero where nothing is mapped.

        Raises ``ValueError`` on a GPU, on which touching unmapped memory is a fault.
        """
        return [self._core.shadow_buffer(*each) for each in self._groups]

    def stats(self) -> MemoryStats:
        return self._core.stats()

    def kind_stats(self) -> list[MemoryStats]:
        """Statistics of each kind of layers, in pages of its own."""
        return self._core.kind_stats()

    def slot_use(self) -> SlotUse:
        stats = self._core.stats()
        return SlotUse(
            stats.used_slots,
            stats.free_mappings,
            stats.pages_unmapped_total,
        )

    def memory_map(self, max_cells: int) -> tuple[int, int, bytes, list[int], NDArray[np.int32]]:
        """A picture of the pool in at most ``max_cells`` cells.

        Returns the pages shown, pages per cell, a code per cell
        (:mod:`vmserve.telemetry.snapshot`), pages by code, and for each slot its sequence or -1,
        its mapped pages and how many of them are the sequence's: int32 ``[num_slots, 3]``.
        """
        return self._core.memory_map(max_cells)

    @property
    def health(self) -> Health:
        return Health[self._core.stats().health.name]

    @property
    def last_error(self) -> str:
        """The system's last refusal; empty if there was none."""
        return self._core.last_error()

    def check(self) -> None:
        self._core.check()

    def require_usable(self) -> None:
        """Raises ``ValueError`` after :meth:`close`, and in a fork of the process."""
        self._core.require_usable()

    def close(self) -> None:
        """Let every later call raise ``ValueError``; the memory is freed with its last tensor.

        Tensors keep their memory: mapped positions can be touched, others are faults as before.
        """
        self._core.close()


def _all_kinds(layout: KVLayout, kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    kinds = tuple(kinds) or (LayerKind(tuple(range(layout.num_layers)), None),)
    return (*kinds, LayerKind((), 1, has_state=True)) if layout.state_bytes else kinds


def _rows(growths: Sequence[Growth] | NDArray[np.int64]) -> NDArray[np.int64]:
    if isinstance(growths, np.ndarray):
        return growths
    return np.array(growths, dtype=np.int64).reshape(-1, 4)


def _op_tuples(
    ops: Sequence[MemoryOp],
) -> list[tuple[_core.OpKind, int, int, int, int, _core.View]]:
    kinds, virtual = _core.OpKind, _core.View.VIRTUAL
    tuples = []
    for op in ops:
        match op:
            case Attach(seq, num_tokens):
                tuples.append((kinds.ATTACH, seq, num_tokens, 0, -1, virtual))
            case Fork(seq, parent, num_tokens):
                tuples.append((kinds.FORK, seq, num_tokens, 0, parent, virtual))
            case Convert(seq, regime):
                tuples.append((kinds.CONVERT, seq, 0, 0, -1, _VIEWS[regime]))
            case SwapOut(seq):
                tuples.append((kinds.SWAP_OUT, seq, 0, 0, -1, virtual))
            case SwapIn(seq):
                tuples.append((kinds.SWAP_IN, seq, 0, 0, -1, virtual))
    return tuples


def _pages(layout: KVLayout, limit_bytes: int) -> int:
    pages = layout.num_pages(limit_bytes)
    if pages < 1:
        raise ConfigurationError(
            f"a KV cache of {format_size(limit_bytes)} does not hold one page of "
            f"{format_size(layout.total_page_bytes)} ({layout.page_tokens} tokens of all layers): "
            "raise --kv-cache-memory or lower --kv-page-size"
        )
    return pages
