"""Room in the KV memory: the blocks that there are, and those that sequences will take.

For admission and claims. What a step takes is not forecast but planned: ``KVMemory.plan`` stages
the operations and counts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from vmserve.memory.base import Regime, SwapIn, unit_tokens
from vmserve.memory.kind_pages import most_units
from vmserve.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from vmserve.memory.base import KVMemory
    from vmserve.scheduler.budget import SchedulerLimits

__all__ = ["Rooms", "RoomsAlone", "open_memory", "release_memory"]

#: Steps for which all running sequences are expected to go on when a preempted one returns.
_STEPS_AHEAD = (4, 8, 16, 32)


def open_memory(memory: KVMemory, sequence: Sequence, tokens: list[int] | None = None) -> None:
    """Open the sequence in memory, in its regime; its id is None if no more can be open."""
    request = sequence.request
    sequence.memory_id = memory.open(
        tokens or (), regime=sequence.regime, tenant=request.memory_tenant, salt=request.cache_salt
    )


def release_memory(memory: KVMemory, sequence: Sequence) -> None:
    """Release the sequence's memory, and its start."""
    assert sequence.memory_id is not None
    memory.release(sequence.memory_id)
    sequence.memory_id = sequence.start = None


class Rooms:
    """Counts in blocks. A virtual sequence takes whole pages, a paged one blocks."""

    def __init__(self, memory: KVMemory, limits: SchedulerLimits) -> None:
        layout = self._layout = memory.layout
        self._memory = memory
        self._limits = limits
        self.blocks_per_page = layout.blocks_per_page
        self._state_blocks = layout.state_blocks
        self.block_bytes = layout.total_page_bytes // self.blocks_per_page

    def left(self, running: Iterable[Sequence]) -> int:
        """Blocks that can be had and that no running sequence is owed."""
        owed = sum(self.owed(sequence) for sequence in running)
        return self._memory.available_pages() * self.blocks_per_page - owed

    @property
    def watermark(self) -> int:
        """Blocks that admission leaves free for decoding while something runs."""
        return int(self._limits.watermark * self._memory.limit_pages) * self.blocks_per_page

    def blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks of ``num_tokens`` in the sequence's regime, and of its state."""
        if num_tokens == 0:
            return 0
        unit = unit_tokens(self._layout, sequence.regime)
        return -(-num_tokens // unit) * (unit // self._layout.block_tokens) + self._state_blocks

    def next_token(self, sequence: Sequence) -> int:
        """Blocks of all known tokens and the next one."""
        return self.blocks(sequence, sequence.num_tokens + 1)

    def shared(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a fork at ``num_tokens`` shares for good."""
        unit = unit_tokens(self._layout, sequence.regime)
        return num_tokens // unit * (unit // self._layout.block_tokens)

    def at_least(self, sequence: Sequence, num_shared: int) -> int:
        """Fewest blocks of a start that shares ``num_shared`` tokens with a sibling."""
        unit = unit_tokens(self._layout, Regime.PAGED)
        own = -(-(sequence.num_tokens + 1) // unit) - num_shared // unit
        return own + self._state_blocks

    def at_most(self, sequence: Sequence) -> int:
        """Most blocks of a start that shares nothing, in any regime."""
        pages = self._layout.pages_for(sequence.num_tokens + 1)
        return pages * self.blocks_per_page + self._state_blocks

    def owed(self, sequence: Sequence) -> int:
        """Blocks that a running sequence still lacks for its known tokens and the next one."""
        has = self.blocks(sequence, sequence.num_computed)
        if isinstance(sequence.start, SwapIn):
            has = 0
        elif sequence.start is not None:
            has = self.shared(sequence, sequence.num_computed)
        return self.next_token(sequence) - has

    def headroom(self, sequences: Collection[Sequence], mean_output: float) -> int:
        """What these will soon take, all together, beyond their known and their next tokens.

        One in ``mean_output`` of them is expected to end at each step, however long it has been
        running, and all at their last token; a standard deviation more may go on.
        """
        tokens = np.array([seq.num_tokens for seq in sequences])
        left = np.array([seq.request.max_tokens - seq.num_output for seq in sequences])
        unit = np.array([unit_tokens(self._layout, seq.regime) for seq in sequences])
        blocks_per_unit = unit // self._layout.block_tokens
        now = int((-(-(tokens + 1) // unit) * blocks_per_unit).sum())
        needed = 0.0
        for num_steps in _STEPS_AHEAD:
            blocks = -(-(tokens + num_steps) // unit) * blocks_per_unit * (left >= num_steps)
            at_most = float(blocks.sum())
            going_on = math.exp(-num_steps / mean_output)
            deviation = math.sqrt(going_on * (1 - going_on) * float((blocks**2).sum()))
            needed = max(needed, min(going_on * at_most + deviation, at_most))
        return max(0, math.ceil(needed) - now)


class RoomsAlone(Rooms):
    """What a sequence takes that starts while nothing runs: with windows, no more than they need.

    Next to others it is counted as if windows kept all. That admits fewer, so that cached prefixes
    live longer.
    """

    def __init__(self, memory: KVMemory, limits: SchedulerLimits) -> None:
        super().__init__(memory, limits)
        kinds = [(len(kind.layers), kind.window) for kind in memory.kinds if not kind.has_state]
        self._kinds = kinds if any(window is not None for _, window in kinds) else []

    def next_token(self, sequence: Sequence) -> int:
        unit = unit_tokens(self._layout, sequence.regime)
        return self._most(sequence, unit, super().next_token(sequence))

    def at_least(self, sequence: Sequence, num_shared: int) -> int:
        unit = unit_tokens(self._layout, Regime.PAGED)
        return self._most(sequence, unit, super().at_least(sequence, num_shared))

    def _most(self, sequence: Sequence, unit: int, whole: int) -> int:
        """Blocks of all layers, each kind's weighed by its layers; at most ``whole``."""
        if not self._kinds:
            return whole
        target = sequence.num_tokens + 1
        chunk = min(target - sequence.num_computed, self._limits.max_num_batched_tokens)
        units = sum(
            num_layers * most_units(target, unit, window, chunk)
            for num_layers, window in self._kinds
        )
        blocks = -(-units * (unit // self._layout.block_tokens) // self._layout.num_layers)
        return min(whole, blocks + self._state_blocks)
