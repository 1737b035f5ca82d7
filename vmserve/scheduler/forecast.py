"""Forecast the blocks that sequences will take, for admission and fairness.

What a step takes is not forecast but planned: ``KVMemory.plan`` stages the operations and counts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from vmserve.memory.base import Regime, SwapIn, unit_tokens
from vmserve.memory.kind_pages import most_units
from vmserve.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    from numpy.typing import NDArray

    from vmserve.memory.base import KVMemory
    from vmserve.memory.layout import KVLayout, LayerKind

__all__ = ["BlockForecast", "WindowForecast", "forecast_for"]

#: A preempted sequence returns when all running ones are expected to go on for these many steps.
_STEPS_AHEAD = (4, 8, 16, 32)


def forecast_for(memory: KVMemory, chunk_tokens: int) -> BlockForecast:
    """``chunk_tokens``: the most that a sequence computes in a step."""
    if any(kind.window is not None and not kind.has_state for kind in memory.kinds):
        return WindowForecast(memory.layout, memory.kinds, chunk_tokens)
    return BlockForecast(memory.layout)


class BlockForecast:
    """Forecasts in blocks. A virtual sequence takes whole pages, a paged one blocks."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self.blocks_per_page = layout.blocks_per_page
        self._state_blocks = layout.state_blocks
        self.block_bytes = layout.total_page_bytes // self.blocks_per_page

    def blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks of ``num_tokens`` in the sequence's regime, and of its state."""
        if num_tokens == 0:
            return 0
        unit = unit_tokens(self._layout, sequence.regime)
        return -(-num_tokens // unit) * (unit // self._layout.block_tokens) + self._state_blocks

    def takes_more(self, sequence: Sequence, num_new: int) -> bool:
        """Whether the next ``num_new`` tokens need another page or block."""
        unit = unit_tokens(self._layout, sequence.regime)
        end = sequence.num_computed + num_new
        return -(-sequence.num_computed // unit) != -(-end // unit)

    def own(self, sequence: Sequence, num_shared: int) -> int:
        """Blocks of a running sequence whose first ``num_shared`` tokens belong to others too."""
        unit = unit_tokens(self._layout, sequence.regime)
        shared = num_shared // unit * (unit // self._layout.block_tokens)
        return self.blocks(sequence, sequence.num_computed) - shared

    def start(self, sequence: Sequence, num_shared: int = 0) -> int:
        """Most blocks of a start until its next token, of which a sibling shares ``num_shared``
        tokens."""
        return self._start(sequence, num_shared, sequence.regime)

    def at_least(self, sequence: Sequence, num_shared: int) -> int:
        """:meth:`start` in the regime that needs the fewest."""
        return self._start(sequence, num_shared, Regime.PAGED)

    def at_most(self, sequence: Sequence) -> int:
        """:meth:`start` in the regime that needs the most."""
        return self._start(sequence, 0, Regime.VIRTUAL)

    def _start(self, sequence: Sequence, num_shared: int, regime: Regime) -> int:
        unit = unit_tokens(self._layout, regime)
        own = -(-(sequence.num_tokens + 1) // unit) - num_shared // unit
        return own * (unit // self._layout.block_tokens) + self._state_blocks

    def owed(self, sequence: Sequence) -> int:
        """Blocks that a running sequence still lacks until its next token."""
        if sequence.start is not None:
            is_swapped = isinstance(sequence.start, SwapIn)
            return self.start(sequence, 0 if is_swapped else sequence.num_computed)
        return self._lacks(sequence)

    def _lacks(self, sequence: Sequence) -> int:
        return self.start(sequence) - self.blocks(sequence, sequence.num_computed)

    def headroom(self, sequences: Collection[Sequence], mean_output: float) -> int:
        """What these will soon take, all together, beyond their known and their next tokens.

        One in ``mean_output`` of them is expected to end at each step, however long it has been
        running, and all at their last token; a standard deviation more may go on.
        """
        tokens = np.array([seq.num_tokens for seq in sequences])
        left = np.array([seq.request.max_tokens - seq.num_output for seq in sequences])
        unit = np.array([unit_tokens(self._layout, seq.regime) for seq in sequences])
        blocks_per_unit = unit // self._layout.block_tokens
        now = float((self._decoding(tokens + 1, unit) * blocks_per_unit).sum())
        needed = 0.0
        for num_steps in _STEPS_AHEAD:
            units = self._decoding(tokens + num_steps, unit)
            blocks = units * blocks_per_unit * (left >= num_steps)
            at_most = float(blocks.sum())
            going_on = math.exp(-num_steps / mean_output)
            deviation = math.sqrt(going_on * (1 - going_on) * float((blocks**2).sum()))
            needed = max(needed, min(going_on * at_most + deviation, at_most))
        return max(0, math.ceil(needed - now))

    def _decoding(self, num_tokens: NDArray[np.int64], unit: NDArray[np.int64]) -> NDArray[Any]:
        """Pages or blocks of ``unit`` tokens of sequences that decode."""
        return -(-num_tokens // unit)


class WindowForecast(BlockForecast):
    """Forecasts in blocks of all layers, rounded up, where some have a window and pages of their
    own.

    After each step these give up what the next token does not see.
    """

    def __init__(self, layout: KVLayout, kinds: Collection[LayerKind], chunk_tokens: int) -> None:
        super().__init__(layout)
        self._chunk_tokens = chunk_tokens
        #: How many layers, and their window, of each kind that keeps tokens.
        self._kinds = [(len(kind.layers), kind.window) for kind in kinds if not kind.has_state]

    def blocks(self, sequence: Sequence, num_tokens: int) -> int:
        return self._own(sequence, num_tokens, 0)

    def own(self, sequence: Sequence, num_shared: int) -> int:
        return self._own(sequence, sequence.num_computed, num_shared)

    def _own(self, sequence: Sequence, num_tokens: int, num_shared: int) -> int:
        def held(unit: int, window: int | None) -> int:
            behind = 0 if window is None else max(0, num_tokens + 1 - window)
            return -(-num_tokens // unit) - max(behind, num_shared) // unit

        if num_tokens == 0:
            return 0
        return self._weighed(sequence.regime, held) + self._state_blocks

    def _start(self, sequence: Sequence, num_shared: int, regime: Regime) -> int:
        target = sequence.num_tokens + 1
        ahead = min(target - max(num_shared, sequence.num_computed), self._chunk_tokens)

        def most(unit: int, window: int | None) -> int:
            shared = num_shared // unit if window is None else 0
            return most_units(target, unit, window, ahead) - shared

        return self._weighed(regime, most) + self._state_blocks

    def _lacks(self, sequence: Sequence) -> int:
        has, target = sequence.num_computed, sequence.num_tokens + 1
        in_window = min(target, has + self._chunk_tokens)

        def growth(unit: int, window: int | None) -> int:
            return -(-(target if window is None else in_window) // unit) - -(-has // unit)

        return self._weighed(sequence.regime, growth) + (0 if has else self._state_blocks)

    def _decoding(self, num_tokens: NDArray[np.int64], unit: NDArray[np.int64]) -> NDArray[Any]:
        total = np.zeros(len(num_tokens))
        for num_layers, window in self._kinds:
            units = -(-num_tokens // unit)
            if window is not None:
                units = np.minimum(units, -(-(window - 1) // unit) + 1)
            total += num_layers * units
        return total / self._layout.num_layers

    def _weighed(self, regime: Regime, units: Callable[[int, int | None], int]) -> int:
        """Blocks of all layers: of each kind's pages or blocks, weighed by its layers."""
        unit = unit_tokens(self._layout, regime)
        total = sum(num_layers * units(unit, window) for num_layers, window in self._kinds)
        return -(-total * (unit // self._layout.block_tokens) // self._layout.num_layers)
