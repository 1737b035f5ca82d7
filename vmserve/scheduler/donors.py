"""Keep finished sequences whose siblings have yet to fork from their prompt."""

from __future__ import annotations

from collections.abc import Iterable

from vmserve.memory.base import KVMemory
from vmserve.scheduler.sequence import Request, Sequence
from vmserve.scheduler.siblings import has_followers

__all__ = ["Donors", "open_memory", "release_memory"]


def open_memory(memory: KVMemory, sequence: Sequence, tokens: list[int] | None = None) -> None:
    """Open the sequence in memory, in its regime; its id is None if no more can be open."""
    request = sequence.request
    sequence.memory_id = memory.open(
        tokens or (), regime=sequence.regime, tenant=request.memory_tenant, salt=request.cache_salt
    )


def release_memory(memory: KVMemory, sequence: Sequence) -> None:
    """Release the sequence's memory, and its start."""
    assert sequence.memory_id is not None
    memory.release(sequence.memory_id)
    sequence.memory_id = sequence.start = None


class Donors:
    """Finished sequences whose memory is kept for siblings that have yet to fork from it.

    ``window``: tokens after which a sequence may have given up some of its past; None: never.
    """

    def __init__(self, memory: KVMemory, window: int | None) -> None:
        self._memory = memory
        self._window = window
        self._kept: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def sequences(self) -> Iterable[Sequence]:
        return self._kept.values()

    def take(self, sequence: Sequence) -> bool:
        """Keep a finished sequence if siblings need its prompt; returns whether it is kept."""
        request = sequence.request
        is_wanted = (
            sequence.has_prompt
            and request.request_id not in self._kept
            and has_followers(request)
            and not any(other.has_prompt for other in request.sequences if other is not sequence)
        )
        if is_wanted:
            self._kept[request.request_id] = sequence
        return is_wanted

    def find(self, sequence: Sequence) -> Sequence | None:
        """A sibling, in any regime, whose memory begins with the prompt of ``sequence``."""
        request = sequence.request
        if request.num_branches == 1:
            return None
        kept = self._kept.get(request.request_id)
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

    def drop(self, request: Request) -> None:
        """Release the request's donor."""
        donor = self._kept.pop(request.request_id, None)
        if donor is not None:
            release_memory(self._memory, donor)

    def drop_unwanted(self) -> None:
        """Release donors whose siblings have all started."""
        for donor in [seq for seq in self._kept.values() if not has_followers(seq.request)]:
            self.drop(donor.request)

    def drop_all(self) -> None:
        """Release all donors. Pending forks of them must have been sent back before."""
        for donor in list(self._kept.values()):
            self.drop(donor.request)
