"""What sequences take of the KV memory, in blocks: estimates; a memory plan has the last word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vmserve.memory.base import Regime, SwapIn
from vmserve.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from vmserve.memory.layout import KVLayout

__all__ = ["HYSTERESIS_TOKENS", "BlockDemand"]

#: A preempted sequence comes back when all can go on for about so many tokens.
HYSTERESIS_TOKENS = 32


class BlockDemand:
    """A virtual sequence takes whole pages, a paged one blocks."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self.blocks_per_page = layout.page_tokens // layout.block_tokens
        self.block_bytes = layout.total_page_bytes // self.blocks_per_page

    def blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """What ``num_tokens`` take in the sequence's regime."""
        if sequence.regime is Regime.VIRTUAL:
            return self._layout.pages_for(num_tokens) * self.blocks_per_page
        return -(-num_tokens // self._layout.block_tokens)

    def next_token(self, sequence: Sequence) -> int:
        """What all known tokens take, and the one that will be sampled."""
        return self.blocks(sequence, sequence.num_tokens + 1)

    def shared(self, sequence: Sequence, num_tokens: int) -> int:
        """How many blocks a fork at ``num_tokens`` shares for good."""
        virtual = sequence.regime is Regime.VIRTUAL
        unit = self._layout.page_tokens if virtual else self._layout.block_tokens
        return num_tokens // unit * (unit // self._layout.block_tokens)

    def owed(self, sequence: Sequence) -> int:
        """What a running sequence has yet to take for its known tokens and the next one."""
        has = self.blocks(sequence, sequence.num_computed)
        if isinstance(sequence.start, SwapIn):
            has = 0
        elif sequence.start is not None:
            has = self.shared(sequence, sequence.num_computed)
        return self.next_token(sequence) - has

    def ahead(self, sequence: Sequence) -> int:
        """What the sequence takes for some tokens more than that."""
        soon = self.blocks(sequence, sequence.num_tokens + HYSTERESIS_TOKENS)
        return soon - self.next_token(sequence)
