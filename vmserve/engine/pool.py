"""The KV memories of an engine as one pool: its model's, and those of models that draft for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vmserve.engine.lease import Lease
from vmserve.engine.persistence import persist_figures
from vmserve.engine.pins import PinnedPrefixes
from vmserve.errors import ConfigurationError, DriverError, OutOfMemoryError
from vmserve.memory.longest import LongestSequence
from vmserve.numbers.sizes import format_size, parse_size
from vmserve.telemetry.kinds import kind_figures

if TYPE_CHECKING:
    from vmserve.engine.build import EngineParts

__all__ = ["Pool"]

logger = logging.getLogger(__name__)

#: Seconds that the end of an engine waits for blocks on their way to --kv-persist. A client waits
#: longer for the end of its process.
FLUSH_SECONDS = 8.0


class Pool:
    """What an engine does with all of its KV memory: limits, pinned prefixes, idleness, the end.

    ``memory``: the model's, which steps plan with. ``pins``: prefixes that stay cached. ``lease``:
    what of it a pool lends that several engines share.
    """

    def __init__(self, parts: EngineParts) -> None:
        memory, resolved = parts.memory, parts.resolved
        self.memory = memory
        self._idle_bytes = parts.idle_bytes
        self._keeps_prefixes = resolved.prefix_caching
        #: Models that draft; each has a part of the limit.
        self._drafting = () if parts.draft_model is None else (parts.draft_model,)
        self._memories = [memory, *(each.memory for each in self._drafting)]
        self._longest = LongestSequence(
            memory.layout,
            memory.kinds,
            memory.max_len,
            memory.options.read_slack_tokens,
            resolved.max_num_batched_tokens,
        )
        self.pins = PinnedPrefixes(memory, resolved, self._longest)
        self.lease = Lease(
            memory,
            parts.scheduler,
            self.pins,
            self._longest,
            parts.clock,
            self._drafting,
        )

    # -- how much there is --------------------------------------------------------------

    def set_limit(self, size: int | str) -> int:
        """See :meth:`vmserve.engine.engine.LLMEngine.set_kv_cache_memory`."""
        if self.lease.is_lent:
            raise ConfigurationError(
                "kv_cache_memory: a pool lends this model's memory: set its cap"
            )
        memory, num_ranks = self.memory, self.memory.layout.tensor_parallel
        page_bytes = num_ranks * memory.layout.total_page_bytes
        num_bytes, before = parse_size(size, "kv_cache_memory"), memory.limit_pages
        parts = [each.part_of(num_bytes) for each in self._drafting]
        num_bytes -= sum(parts)
        if num_bytes // page_bytes > memory.max_pages:
            raise ConfigurationError(
                f"kv_cache_memory: {format_size(num_bytes)} is more than the "
                f"{format_size(memory.max_pages * page_bytes)} that the device has: lower it"
            )
        self._longest.require(num_bytes // num_ranks, self.pins.num_pages)
        try:
            memory.set_limit(num_bytes // num_ranks)
            for drafting, part in zip(self._drafting, parts, strict=True):
                drafting.set_limit(part)
        except DriverError as error:
            logger.warning("the pool keeps its pages for now: %s", error)
        limit, former = (pages * page_bytes for pages in (memory.limit_pages, before))
        logger.info("the KV cache may take %s, not %s", format_size(limit), format_size(former))
        return limit + self._draft_bytes

    def bounds(self, pinned: Sequence[int]) -> tuple[int, int]:
        """See :meth:`vmserve.engine.engine.LLMEngine.kv_bounds`."""
        pages = max(self.pins.num_pages, sum(map(self._longest.pages_to_pin, pinned)))
        least = self._longest.least_bytes(pages)
        return self.memory.limit_bytes + self._draft_bytes, least + self._draft_bytes

    @property
    def _draft_bytes(self) -> int:
        return sum(each.limit_bytes for each in self._drafting)

    # -- what is in it ------------------------------------------------------------------

    def forget_prefixes(self) -> None:
        """Forget every cached prefix, pinned ones and those that outlive the process too."""
        self.pins.clear()
        for memory in self._memories:
            memory.clear_cache()

    def idle(self) -> None:
        """Give free pages back to the system, as nothing runs."""
        for memory in self._memories:
            memory.write_when_idle()
        self._report_persistence()
        # Keep cached prefixes; without prefix caching drop parked slots.
        for memory in self._memories:
            keep_pages = self._idle_bytes // memory.layout.total_page_bytes
            keep_pages = max(keep_pages, memory.ready_pages)
            try:
                memory.wait()
                memory.trim(keep_pages, drop_idle=not self._keeps_prefixes)
            except (OutOfMemoryError, DriverError) as error:
                logger.warning("the pool keeps its pages for now: %s", error)

    def _report_persistence(self) -> None:
        for memory in self._memories:
            for message in memory.persist_messages():
                logger.warning("kv_persist: %s", message)

    # -- figures and the end ------------------------------------------------------------

    def figures(self) -> dict[str, float | int]:
        """All metrics of the memory, by names without prefix."""
        self._report_persistence()
        stats = [memory.stats() for memory in self._memories]
        return {
            "kv_cache_usage_perc": stats[0].used_pages / stats[0].limit_pages,
            "num_sequences_swapped": stats[0].swapped_seqs,
            "pinned_prefixes": len(self.pins),
            "tensor_parallel_size": self.memory.layout.tensor_parallel,
            **stats[0].as_dict(),
            **persist_figures(*stats),
            **kind_figures(self.memory),
        }

    def close(self) -> None:
        """Wait for blocks on their way to a store, and free all memory."""
        seconds = FLUSH_SECONDS / len(self._memories)
        if not all(memory.flush(seconds) for memory in self._memories):
            logger.warning("kv_persist: not all blocks were written in %g seconds", FLUSH_SECONDS)
        self._report_persistence()
        for memory in self._memories:
            memory.close()
