"""Raise low-priority requests that have waited for long.

A waiting sequence whose request arrived ``max_wait`` ago is *raised*: it is served before all
others, in order of arrival, and no claim takes its place. It preempts none: it waits for the next
free place. Raised sequences take at most a quarter of the places, so urgent requests keep theirs
however many others have waited for long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vmserve.scheduler.sequence import SequenceStatus
from vmserve.scheduler.siblings import num_places

if TYPE_CHECKING:
    from collections.abc import Callable

    from vmserve.scheduler.queues import Queues
    from vmserve.scheduler.sequence import Sequence

__all__ = ["Ageing"]

#: Divisor of the places: raised sequences take at most 1 / ``_SHARE`` of them, and at least one.
_SHARE = 4
#: Looks for sequences that have waited long enough, within ``max_wait``.
_LOOKS = 16


class Ageing:
    """Raises waiting sequences. ``max_wait``: in seconds of ``clock``, which also gives arrival
    times."""

    def __init__(
        self, max_wait: float, max_num_seqs: int, queues: Queues, clock: Callable[[], float]
    ) -> None:
        self._max_wait = max_wait
        self._most = max(1, max_num_seqs // _SHARE)
        self._queues = queues
        self._clock = clock
        self._next_look = 0.0
        self._raised: list[Sequence] = []
        self.num_raised = 0

    def raise_waiting(self) -> None:
        """Raise sequences that have waited long enough; call once a step."""
        now = self._clock()
        waiting = [*self._queues.waiting, *self._queues.swapped]
        if now < self._next_look or not waiting:
            return
        self._next_look = now + self._max_wait / _LOOKS
        self._raised = [seq for seq in self._raised if seq.status is not SequenceStatus.FINISHED]
        first_rank = min(seq.rank for seq in (*waiting, *self._queues.running))
        for sequence in sorted(waiting, key=lambda seq: seq.request.arrival):
            if now - sequence.request.metrics.arrival_time < self._max_wait:
                break
            if sequence.is_raised or sequence.rank == first_rank:
                continue
            request = sequence.request
            group = request.sequences if request.is_gang else [sequence]
            if self._raised and num_places([*self._raised, *group]) > self._most:
                break
            for each in group:
                each.is_raised = True
            self._raised += group
            self.num_raised += 1
        self._queues.sort()
