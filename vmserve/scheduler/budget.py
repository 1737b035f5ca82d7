"""What one step may spend."""

from __future__ import annotations

from collections.abc import Iterable

from vmserve.scheduler.base import ScheduledSequence
from vmserve.scheduler.sequence import Sequence

__all__ = ["StepBudget"]


class StepBudget:
    """What is left of a step: tokens to compute, and prompt tokens to score."""

    def __init__(self, tokens: int, scored: int) -> None:
        self.tokens = tokens
        self.scored = scored

    def can_take(self, sequence: Sequence) -> bool:
        return self.tokens > 0 and (self.scored > 0 or not sequence.num_unscored)

    def take(self, sequence: Sequence) -> ScheduledSequence:
        """As much of the sequence as there is room for."""
        assert sequence.memory_id is not None
        num_new = min(sequence.num_uncomputed, self.tokens)
        if sequence.num_unscored:
            num_new = min(num_new, self.scored)
        item = ScheduledSequence(
            sequence, sequence.memory_id, sequence.num_computed, num_new, sequence.regime
        )
        self.spend([item])
        return item

    def spend(self, items: Iterable[ScheduledSequence]) -> None:
        for item in items:
            self.tokens -= item.num_new
            if item.sequence.num_unscored:
                self.scored -= item.num_new
