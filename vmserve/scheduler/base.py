"""What a scheduler decides: which sequences compute how many tokens in this step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vmserve.errors import OutOfMemoryError
from vmserve.memory.base import MemoryPlan, Regime
from vmserve.scheduler.sequence import Request, Sequence

__all__ = ["NoRoomError", "ScheduledSequence", "Scheduler", "StepPlan"]


class NoRoomError(OutOfMemoryError):
    """``request_id`` can never go on: what it needs is not to be had."""

    def __init__(self, request_id: str, text: str) -> None:
        super().__init__(text)
        self.request_id = request_id


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

    def convert(self, request: Request, regime: Regime, reason: str = "converted") -> None:
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
