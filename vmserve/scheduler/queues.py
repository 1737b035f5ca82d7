"""Where the sequences are that a scheduler serves."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from vmserve.scheduler.sequence import Sequence, SequenceStatus

__all__ = ["Queues"]

_ORDER = attrgetter("order")


class Queues:
    """Each list is in the order in which sequences are served; a status says where one is.

    The lists stay the same objects: others look at them, and change them only through this one.
    """

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        #: In host memory, or on the way there.
        self.swapped: list[Sequence] = []

    def wait(self, sequence: Sequence) -> None:
        self._enter(sequence, self.waiting, SequenceStatus.WAITING)

    def run(self, sequence: Sequence) -> None:
        self._enter(sequence, self.running, SequenceStatus.RUNNING)

    def swap(self, sequence: Sequence) -> None:
        self._enter(sequence, self.swapped, SequenceStatus.SWAPPED)

    def leave(self, sequence: Sequence) -> None:
        """Of those in none of the lists nothing is known here."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is SequenceStatus.SWAPPED:
            self.swapped.remove(sequence)

    def sort(self) -> None:
        """Orders have changed."""
        for queue in (self.waiting, self.running, self.swapped):
            queue.sort(key=_ORDER)

    @staticmethod
    def _enter(sequence: Sequence, queue: list[Sequence], status: SequenceStatus) -> None:
        sequence.status = status
        insort(queue, sequence, key=_ORDER)
