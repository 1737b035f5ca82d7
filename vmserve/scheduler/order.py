"""The order in which sequences are served: by rank, then by arrival, in three queues.

A waiting sequence whose request arrived ``priority_max_wait`` ago is *raised*: it is served before
all others, in order of arrival, and no claim takes its place. It preempts none: it waits for the
next free place. Raised sequences take at most a quarter of the places, so urgent requests keep
theirs however many others have waited for long.
"""

from __future__ import annotations

import math
from bisect import insort
from operator import attrgetter
from typing import TYPE_CHECKING

from vmserve.scheduler.sequence import Sequence, SequenceStatus, num_places

if TYPE_CHECKING:
    from collections.abc import Callable

    from vmserve.scheduler.budget import SchedulerLimits

__all__ = ["Order"]

_ORDER = attrgetter("order")
#: Divisor of the places: raised sequences take at most 1 / ``_SHARE`` of them, and at least one.
_SHARE = 4
#: Looks for sequences that have waited long enough, within the longest wait.
_LOOKS = 16


class Order:
    """The queues; a sequence's status names its own.

    The lists stay the same objects. Others read them, and change them only through this class.
    ``clock``: in seconds, as arrival times.
    """

    def __init__(self, limits: SchedulerLimits, clock: Callable[[], float]) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        #: Sequences in host memory, or on the way there.
        self.swapped: list[Sequence] = []
        self._max_wait = math.inf if (wait := limits.priority_max_wait) is None else wait
        self._most_raised = max(1, limits.max_num_seqs // _SHARE)
        self._clock = clock
        self._next_look = -math.inf if math.isfinite(self._max_wait) else math.inf
        self._raised: list[Sequence] = []

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

    @staticmethod
    def _enter(sequence: Sequence, queue: list[Sequence], status: SequenceStatus) -> None:
        sequence.status = status
        insort(queue, sequence, key=_ORDER)

    def raise_waiting(self) -> int:
        """Raise sequences that have waited long enough; call once a step. Returns how many."""
        if not (self.waiting or self.swapped) or (now := self._clock()) < self._next_look:
            return 0
        waiting = [*self.waiting, *self.swapped]
        self._next_look = now + self._max_wait / _LOOKS
        self._raised = [seq for seq in self._raised if seq.status is not SequenceStatus.FINISHED]
        first_rank = min(seq.rank for seq in (*waiting, *self.running))
        num_raised = 0
        for sequence in sorted(waiting, key=lambda seq: seq.request.arrival):
            if now - sequence.request.metrics.arrival_time < self._max_wait:
                break
            if sequence.is_raised or sequence.rank == first_rank:
                continue
            request = sequence.request
            group = request.sequences if request.is_gang else [sequence]
            if self._raised and num_places([*self._raised, *group]) > self._most_raised:
                break
            for each in group:
                each.is_raised = True
            self._raised += group
            num_raised += 1
        for queue in (self.waiting, self.running, self.swapped):
            queue.sort(key=_ORDER)
        return num_raised
