"""How the sequences of one request stand to each other."""

from __future__ import annotations

from vmserve.memory.base import Fork
from vmserve.scheduler.sequence import Sequence, SequenceStatus

__all__ = ["has_yet_to_start", "is_fork_of", "leads"]


def leads(sequence: Sequence) -> bool:
    """Whether the sequence will compute its request's prompt, or has."""
    return sequence.status in (
        SequenceStatus.RUNNING,
        SequenceStatus.WAITING,
        SequenceStatus.SWAPPED,
    )


def is_fork_of(sequence: Sequence, sources: set[int | None]) -> bool:
    """Whether the sequence is to start, in the next plan, as a fork of one of these."""
    return isinstance(sequence.start, Fork) and sequence.start.parent in sources


def has_yet_to_start(sequence: Sequence) -> bool:
    if sequence.status in (SequenceStatus.FOLLOWING, SequenceStatus.WAITING):
        return True
    return sequence.status is SequenceStatus.RUNNING and isinstance(sequence.start, Fork)
