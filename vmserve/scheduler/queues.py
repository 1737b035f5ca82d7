"""The queues of a scheduler."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from vmserve.scheduler.sequence import Sequence, SequenceStatus

__all__ = ["Queues"]

_ORDER = attrgetter("order")


class Queues:
    """Lists of sequences in the order in which they are served; a sequence's status names its list.

    The lists stay the same objects. Others read them, and change them only through this class.
    """

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        #: Sequences in host memory, or on the way there.
        self.swapped: list[Sequence] = []

    def wait(self, sequence: Sequence) -> None:
        self._enter(sequence, self.waiting, SequenceStatus.WAITING)

    def run(self, sequence: Sequence) -> None:
        self._enter(sequence, self.running, SequenceStatus.RUNNING)

    def swap(self, sequence: Sequence) -> None:
        self._enter(sequence, self.swapped, SequenceStatus.SWAPPED)

    def leave(self, sequence: Sequence) -> None:
        """Remove the sequence from its list; a sequence in no list is ignored."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is SequenceStatus.SWAPPED:
            self.swapped.remove(sequence)

    def sort(self) -> None:
        """Sort again after orders have changed."""
        for queue in (self.waiting, self.running, self.swapped):
            queue.sort(key=_ORDER)

    @staticmethod
    def _enter(sequence: Sequence, queue: list[Sequence], status: SequenceStatus) -> None:
        sequence.status = status
        insort(queue, sequence, key=_ORDER)
