"""What a scheduler decides: which sequences compute how many tokens in this step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vmserve.memory.base import MemoryPlan, Regime
from vmserve.scheduler.sequence import Request, Sequence

__all__ = ["ScheduledSequence", "Scheduler", "StepPlan"]


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """``num_new`` tokens of ``sequence``, from position ``num_past`` on.

    ``memory_id``: the sequence in the KV memory; ``regime``: how kernels see it in this step.
    """

    sequence: Sequence
    memory_id: int
    num_past: int
    num_new: int
    regime: Regime = Regime.VIRTUAL

    @property
    def samples(self) -> bool:
        """Whether the last new token is the last known one, so that the next can be drawn."""
        return self.num_past + self.num_new == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what is computed and the memory that it needs."""

    scheduled: tuple[ScheduledSequence, ...]
    memory: MemoryPlan

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new for item in self.scheduled)


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

        Raises :class:`~vmserve.errors.OutOfMemoryError` when a sequence that runs alone finds
        no memory: the pool has lost pages, and waiting brings none.
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

    def make_room(self) -> Sequence | None:
        """The system refused memory: preempt the policy's victim; None when only one runs."""
        ...

    @property
    def num_running(self) -> int: ...

    @property
    def running_request_ids(self) -> list[str]:
        """The requests of the sequences that run, in order of arrival."""
        ...

    @property
    def num_waiting(self) -> int: ...
