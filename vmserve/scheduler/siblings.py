"""Relations between the sequences of one request."""

from __future__ import annotations

from collections.abc import Iterable

from vmserve.memory.base import Fork
from vmserve.scheduler.sequence import Request, Sequence, SequenceStatus

__all__ = ["computes_prompt", "has_followers", "is_fork_of", "num_places", "with_its_gang"]


def computes_prompt(sequence: Sequence) -> bool:
    """Whether the sequence computes its request's prompt, will, or has."""
    return sequence.status in (
        SequenceStatus.RUNNING,
        SequenceStatus.WAITING,
        SequenceStatus.SWAPPED,
    )


def is_fork_of(sequence: Sequence, sources: set[int | None]) -> bool:
    """Whether the next plan starts the sequence as a fork of one of ``sources``."""
    return isinstance(sequence.start, Fork) and sequence.start.parent in sources


def has_followers(request: Request) -> bool:
    """Whether a sequence of the request has yet to start, perhaps as a fork of another."""
    return any(_has_yet_to_start(sequence) for sequence in request.sequences)


def with_its_gang(sequence: Sequence, among: Iterable[Sequence]) -> list[Sequence]:
    """The sequence; of a beam search, all its beams that are in ``among``."""
    request = sequence.request
    if not request.is_gang:
        return [sequence]
    return [other for other in among if other.request is request]


def num_places(sequences: Iterable[Sequence]) -> int:
    """How many sequences these are or may become: beams fork at any step."""
    gangs: set[Request] = set()
    others = 0
    for sequence in sequences:
        if sequence.request.is_gang:
            gangs.add(sequence.request)
        else:
            others += 1
    return others + sum(gang.num_branches for gang in gangs)


def _has_yet_to_start(sequence: Sequence) -> bool:
    if sequence.status in (SequenceStatus.FOLLOWING, SequenceStatus.WAITING):
        return True
    return sequence.status is SequenceStatus.RUNNING and isinstance(sequence.start, Fork)
