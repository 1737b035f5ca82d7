"""What a scheduler decides: which sequences compute how many tokens in this step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vmserve.errors import OutOfMemoryError
from vmserve.memory.base import Convert, MemoryPlan, Regime
from vmserve.scheduler.sequence import Request, Sequence

__all__ = ["Flags", "Ints", "NoRoomError", "ScheduledSequence", "Scheduler", "Share", "StepPlan"]

#: A sequence's share of a step: how many tokens of it are computed.
Share = tuple[Sequence, int]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


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
    samples: bool


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step: what is computed and the memory that it needs.

    In columns, ``[sequences]`` each, as a step is made of hundreds of sequences: ``num_new`` tokens
    are computed, from position ``num_past`` on, with the keys and values of ``memory_ids``.
    """

    sequences: list[Sequence]
    memory_ids: Ints
    num_past: Ints
    num_new: Ints
    #: Kernels see it through its block table in this step, else in its slot.
    is_paged: Flags
    #: Some of its new tokens are of its prompt.
    reads_prompt: Flags
    #: The last new token is the last known one, so that the next can be drawn.
    samples: Flags
    memory: MemoryPlan

    @staticmethod
    def of(shares: list[Share], memory: MemoryPlan) -> StepPlan:
        """``memory``: the growths of the shares, in their order."""
        sequences = [sequence for sequence, _ in shares]
        num_new = np.array([num_new for _, num_new in shares])
        memory_ids, ends = memory.rows[:, 0], memory.rows[:, 1]
        num_past = ends - num_new
        return StepPlan(
            sequences,
            memory_ids,
            num_past,
            num_new,
            _is_paged(sequences, memory_ids, memory),
            num_past < np.array([sequence.num_prompt for sequence in sequences]),
            ends == np.array([len(sequence.tokens) for sequence in sequences]),
            memory,
        )

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def num_tokens(self) -> int:
        return int(self.num_new.sum())

    @property
    def scheduled(self) -> tuple[ScheduledSequence, ...]:
        """The columns, entry by entry."""
        columns = zip(
            self.sequences,
            self.memory_ids.tolist(),
            self.num_past.tolist(),
            self.num_new.tolist(),
            [Regime.PAGED if is_paged else Regime.VIRTUAL for is_paged in self.is_paged],
            self.samples.tolist(),
            strict=True,
        )
        return tuple(ScheduledSequence(*entry) for entry in columns)

    def in_order(self, order: Ints) -> StepPlan:
        """The same step; entry ``order[i]`` of each column is its ``i``-th."""
        return StepPlan(
            [self.sequences[row] for row in order.tolist()],
            self.memory_ids[order],
            self.num_past[order],
            self.num_new[order],
            self.is_paged[order],
            self.reads_prompt[order],
            self.samples[order],
            self.memory,
        )


def _is_paged(sequences: list[Sequence], memory_ids: Ints, memory: MemoryPlan) -> Flags:
    """As the sequences are once the plan's conversions are done."""
    paged = Regime.PAGED
    is_paged = np.array([sequence.regime is paged for sequence in sequences])
    for op in memory.ops:
        if isinstance(op, Convert):
            is_paged[memory_ids == op.seq] = op.regime is paged
    return is_paged


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
