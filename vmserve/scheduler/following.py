"""Sequences in no queue, which wait for a sibling to compute their common prompt."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from vmserve.scheduler.sequence import Request, Sequence, SequenceStatus
from vmserve.scheduler.siblings import computes_prompt

__all__ = ["Following"]


class Following:
    """Followers by request, so that a step looks only at requests in which something may have
    changed."""

    def __init__(self) -> None:
        self._by_request: dict[Request, list[Sequence]] = {}
        #: Requests that have lost a sequence since the last look.
        self._lost_member: set[Request] = set()
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.FOLLOWING
        self._by_request.setdefault(sequence.request, []).append(sequence)
        self._num += 1

    def remove(self, sequence: Sequence) -> None:
        followers = self._by_request[sequence.request]
        followers.remove(sequence)
        if not followers:
            del self._by_request[sequence.request]
        self._num -= 1

    def lost_member(self, request: Request) -> None:
        """Note that a sequence of the request has ended: a follower may have to compute the
        prompt."""
        if request in self._by_request:
            self._lost_member.add(request)

    def take_ready(self, running: Iterable[Sequence], donors: Iterable[Sequence]) -> list[Sequence]:
        """Remove and return the followers that can start now, in order.

        All of a request's if a sibling has the prompt; one of them if no sibling computes it.
        """
        if not self._by_request:
            return []
        requests = {seq.request for seq in (*running, *donors)} | self._lost_member
        self._lost_member.clear()
        donating = {seq.request for seq in donors}
        ready: list[Sequence] = []
        for request in requests & self._by_request.keys():
            followers = sorted(self._by_request[request], key=attrgetter("index"))
            if request in donating or any(seq.has_prompt for seq in request.sequences):
                ready += followers
            elif not any(computes_prompt(seq) for seq in request.sequences):
                ready.append(followers[0])
        for sequence in ready:
            self.remove(sequence)
        return sorted(ready, key=attrgetter("order"))
