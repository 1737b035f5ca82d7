"""What one step may spend."""

from __future__ import annotations

from collections.abc import Iterable

from vmserve.scheduler.base import Share, StepDraft
from vmserve.scheduler.sequence import Sequence

__all__ = ["StepBudget"]


class StepBudget:
    """What is left of a step: tokens to compute, and prompt tokens to score."""

    def __init__(self, tokens: int, scored: int) -> None:
        self.tokens = tokens
        self.scored = scored

    def can_take(self, sequence: Sequence) -> bool:
        return self.tokens > 0 and (self.scored > 0 or not sequence.num_unscored)

    def take(self, sequence: Sequence) -> Share:
        """As much of the sequence as there is room for."""
        num_new = min(sequence.num_uncomputed, self.tokens)
        if sequence.num_unscored:
            num_new = min(num_new, self.scored)
        self.spend([(sequence, num_new)])
        return sequence, num_new

    def take_next_tokens(self, decoding: list[Sequence]) -> StepDraft:
        """One token of each, as far as they go.

        Nothing of a prompt is scored by it: its last token but one scores the last.
        """
        taken = decoding[: self.tokens]
        self.tokens -= len(taken)
        return StepDraft(taken, [1] * len(taken))

    def spend(self, shares: Iterable[Share]) -> None:
        for sequence, num_new in shares:
            self.tokens -= num_new
            if sequence.num_unscored:
                self.scored -= num_new
