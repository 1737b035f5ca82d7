"""Deadlines of requests."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from vmserve.errors import DeadlineError
from vmserve.scheduler.sequence import Request

__all__ = ["Deadlines", "too_late"]


class Deadlines:
    """The deadlines of an engine's requests, the next one first.

    ``most``: seconds that every request has from its arrival on, unless it asks for fewer.
    ``requests``: those that have not ended, by id. Deadlines of others are skipped.
    """

    def __init__(self, most: float | None, requests: Mapping[str, Request]) -> None:
        self._most = most
        self._requests = requests
        #: Heap of deadlines and request ids.
        self._waiting: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """How many are kept, including those of requests that have ended."""
        return len(self._waiting)

    def set(self, request: Request, timeout: float | None) -> None:
        limits = [each for each in (timeout, self._most) if each is not None]
        if not limits:
            return
        if len(self._waiting) > 2 * len(self._requests) + 64:  # most of them have ended
            self._waiting = [each for each in self._waiting if each[1] in self._requests]
            heapq.heapify(self._waiting)
        request.deadline = request.metrics.arrival_time + min(limits)
        heapq.heappush(self._waiting, (request.deadline, request.request_id))

    def pop_late(self, now: float) -> Request | None:
        """Remove and return a request whose deadline is over at ``now``; None if there is none."""
        while self._waiting and self._waiting[0][0] <= now:
            deadline, request_id = heapq.heappop(self._waiting)
            request = self._requests.get(request_id)
            # Else it has ended, and perhaps another request has its id.
            if request is not None and request.deadline == deadline:
                return request
        return None


def too_late(request: Request) -> DeadlineError:
    """The error for a late request; ask for it before the request is aborted."""
    assert request.deadline is not None
    seconds = request.deadline - request.metrics.arrival_time
    num_output = sum(sequence.num_output for sequence in request.sequences)
    return DeadlineError(
        f"the request did not end within its {seconds:g} seconds; {num_output} tokens were "
        "generated: allow more time, or ask for fewer tokens"
    )
