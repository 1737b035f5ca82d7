"""Families: the sequences of one request, which share its prompt.

One computes the prompt; the others *follow*, in no queue, and start as forks of it, at first and
after each preemption. A finished sequence is kept as *donor* as long as others have yet to fork
from its prompt.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from vmserve.scheduler.rooms import release_memory
from vmserve.scheduler.sequence import Request, Sequence, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Collection

    from vmserve.memory.base import KVMemory
    from vmserve.scheduler.order import Order

__all__ = ["Families"]


class Families:
    """``window``: tokens after which a sequence may have given up some of its past; None: never."""

    def __init__(self, memory: KVMemory, order: Order, window: int | None) -> None:
        self._memory = memory
        self._order = order
        self._window = window
        #: Followers by request, so that a step looks only at requests in which something may have
        #: changed.
        self._followers: dict[Request, list[Sequence]] = {}
        #: Requests that have lost a sequence since the last look.
        self._lost_member: set[Request] = set()
        self.num_following = 0
        self._donors: dict[str, Sequence] = {}

    # -- followers ----------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Let the first of a new request's sequences wait, and the others follow it."""
        first, *others = request.sequences
        self._order.wait(first)
        for sequence in others:
            self._follow(sequence)

    def wait(self, sequence: Sequence) -> None:
        """Let it wait, or follow a sibling that computes the prompt."""
        if any(
            other.computes_prompt for other in sequence.request.sequences if other is not sequence
        ):
            self._follow(sequence)
        else:
            self._order.wait(sequence)

    def _follow(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.FOLLOWING
        self._followers.setdefault(sequence.request, []).append(sequence)
        self.num_following += 1

    def _leave(self, sequence: Sequence) -> None:
        followers = self._followers[sequence.request]
        followers.remove(sequence)
        if not followers:
            del self._followers[sequence.request]
        self.num_following -= 1

    def start_ready(self) -> None:
        """Let followers wait that can start now.

        All of a request's if a sibling has the prompt; one of them if no sibling computes it.
        """
        if not self._followers:
            return
        donating = {donor.request for donor in self._donors.values()}
        requests = {seq.request for seq in self._order.running} | donating | self._lost_member
        self._lost_member.clear()
        ready: list[Sequence] = []
        for request in requests & self._followers.keys():
            followers = sorted(self._followers[request], key=attrgetter("index"))
            if request in donating or any(seq.has_prompt for seq in request.sequences):
                ready += followers
            elif not any(seq.computes_prompt for seq in request.sequences):
                ready.append(followers[0])
        for sequence in sorted(ready, key=attrgetter("order")):
            self._leave(sequence)
            self._order.wait(sequence)

    # -- ends and donors ----------------------------------------------------------------

    def end(self, sequence: Sequence) -> None:
        """Finish a sequence that has left its queue. Its memory goes, unless siblings need it."""
        request, was = sequence.request, sequence.status
        if was is SequenceStatus.FOLLOWING:
            self._leave(sequence)
        sequence.status = SequenceStatus.FINISHED
        if sequence.memory_id is not None and (
            was is SequenceStatus.SWAPPED or not self._keep(sequence)
        ):
            release_memory(self._memory, sequence)
        if request in self._followers:
            self._lost_member.add(request)  # a follower may have to compute the prompt
        if not request.has_followers:
            self.drop_donor(request)

    def _keep(self, sequence: Sequence) -> bool:
        """Keep a finished sequence as donor if siblings need its prompt; returns whether."""
        request = sequence.request
        is_wanted = (
            sequence.has_prompt
            and request.request_id not in self._donors
            and request.has_followers
            and not any(other.has_prompt for other in request.sequences if other is not sequence)
        )
        if is_wanted:
            self._donors[request.request_id] = sequence
        return is_wanted

    @property
    def donors(self) -> Collection[Sequence]:
        return self._donors.values()

    def parent_for(self, sequence: Sequence) -> Sequence | None:
        """A sibling, in any regime, whose memory begins with the prompt of ``sequence``."""
        request = sequence.request
        if request.num_branches == 1:
            return None
        kept = self._donors.get(request.request_id)
        for other in (*request.sequences, kept):
            if other is None or other is sequence or not other.has_prompt:
                continue
            if self._keeps_prompt(other):
                return other
        return None

    def _keeps_prompt(self, sequence: Sequence) -> bool:
        """Whether it still has all that a fork at the prompt's end sees."""
        window = self._window
        return window is None or sequence.num_computed <= max(window, sequence.num_prompt)

    def drop_donor(self, request: Request) -> None:
        """Release the request's donor."""
        donor = self._donors.pop(request.request_id, None)
        if donor is not None:
            release_memory(self._memory, donor)

    def drop_unwanted(self) -> None:
        """Release donors whose siblings have all started."""
        if not self._donors:
            return
        for donor in [seq for seq in self._donors.values() if not seq.request.has_followers]:
            self.drop_donor(donor.request)

    def drop_donors(self) -> None:
        """Release all donors. Pending forks of them must have been sent back before."""
        for donor in list(self._donors.values()):
            self.drop_donor(donor.request)
