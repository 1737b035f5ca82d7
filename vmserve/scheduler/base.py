"""What a scheduler decides: which sequences compute how many tokens in this step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vmserve.errors import OutOfMemoryError
from vmserve.memory.base import MemoryPlan, Regime
from vmserve.scheduler.sequence import Request, Sequence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

__all__ = ["NoRoomError", "ScheduledSequence", "Scheduler", "Share", "StepPlan"]

#: A sequence's share of a step: how many tokens of it are computed.
Share = tuple[Sequence, int]


class NoRoomError(OutOfMemoryError):
    """``request_id`` can never go on: what it needs is not to be had."""

    def __init__(self, request_id: str, text: str) -> None:
        super().__init__(text)
        self.request_id = request_id


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """An entry of a :class:`StepPlan`."""

    sequence: Sequence
    memory_id: int
    num_past: int
    num_new: int
    regime: Regime

    @property
    def samples(self) -> bool:
        """Whether the last new token is the last known one, so that the next can be drawn."""
        return self.num_past + self.num_new == self.sequence.num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step: what is computed and the memory that it needs.

    In columns, with an entry for each sequence, as a step is made for hundreds of them: ``num_new``
    tokens of ``sequences``, from position ``num_past`` on. ``memory_ids``: the sequence in the KV
    memory; ``is_paged``, bool ``[sequences]``: kernels see it through its block table in this step,
    else in its slot.
    """

    sequences: tuple[Sequence, ...]
    memory_ids: tuple[int, ...]
    num_past: tuple[int, ...]
    num_new: tuple[int, ...]
    is_paged: NDArray[np.bool_]
    memory: MemoryPlan

    @staticmethod
    def of(
        shares: list[Share], memory: MemoryPlan, conversions: Mapping[int, Regime] | None = None
    ) -> StepPlan:
        """``conversions``: the regimes that memory ids are in once the memory is there."""
        sequences, num_new = zip(*shares, strict=True)
        paged = Regime.PAGED
        is_paged = [sequence.regime is paged for sequence in sequences]
        memory_ids = tuple([sequence.memory_id for sequence in sequences])
        if conversions:
            is_paged = [
                conversions.get(memory_id, sequence.regime) is paged
                for memory_id, sequence in zip(memory_ids, sequences, strict=True)
            ]
        return StepPlan(
            sequences,
            memory_ids,
            tuple([sequence.num_computed for sequence in sequences]),
            num_new,
            np.array(is_paged),
            memory,
        )

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_new)

    @property
    def scheduled(self) -> tuple[ScheduledSequence, ...]:
        """The columns, entry by entry."""
        regimes = [Regime.PAGED if is_paged else Regime.VIRTUAL for is_paged in self.is_paged]
        columns = (self.sequences, self.memory_ids, self.num_past, self.num_new, regimes)
        return tuple(ScheduledSequence(*entry) for entry in zip(*columns, strict=True))

    def in_order(self, order: NDArray[np.int64]) -> StepPlan:
        """The same step, entry ``order[i]`` of each column as its ``i``-th."""
        rows = order.tolist()
        return StepPlan(
            tuple([self.sequences[row] for row in rows]),
            tuple([self.memory_ids[row] for row in rows]),
            tuple([self.num_past[row] for row in rows]),
            tuple([self.num_new[row] for row in rows]),
            self.is_paged[order],
            self.memory,
        )


class Scheduler(Protocol):
    """Owns the queues. Sees token counts and pages, never a tensor."""

    num_preemptions_total: int

    def add(self, request: Request) -> None: ...

    def abort(self, request: Request) -> None:
        """Drop every sequence of the request that has not finished, and its memory."""
        ...

    def finish(self, sequence: Sequence) -> None:
        """The sequence has its last token: release its memory."""
        ...

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to run.

        Raises :class:`NoRoomError` when there is no memory for a request even alone: waiting
        would bring none.
        """
        ...

    def applied(self, plan: StepPlan) -> None:
        """The plan's memory is there: forks, prefix hits and conversions are done."""
        ...

    def computed(self, plan: StepPlan) -> None:
        """The plan's tokens are in the KV cache."""
        ...

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """``child`` runs from here on and starts as a fork of all that ``parent`` has computed."""
        ...

    def convert(self, request: Request, regime: Regime) -> None:
        """Keep the request in ``regime`` from the next step on that has the memory for it."""
        ...

    def make_room(self) -> bool:
        """The system refused memory: something gives way. False when only one request runs."""
        ...

    @property
    def num_running(self) -> int: ...

    @property
    def running_request_ids(self) -> list[str]:
        """The requests of the sequences that run, in order of arrival."""
        ...

    @property
    def num_waiting(self) -> int: ...
