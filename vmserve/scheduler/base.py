"""What a scheduler decides: which sequences compute how many tokens in this step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vmserve import _core
from vmserve.errors import OutOfMemoryError
from vmserve.memory.base import Convert, MemoryPlan, Regime
from vmserve.scheduler.sequence import Request, Sequence

__all__ = [
    "Columns",
    "Flags",
    "Ints",
    "NoRoomError",
    "ScheduledSequence",
    "Scheduler",
    "Share",
    "StepDraft",
    "StepPlan",
]

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
    #: How kernels see it in this step.
    regime: Regime
    samples: bool


class Columns(NamedTuple):
    """What a step needs to know of its sequences, by the attributes' names; ``tokens``: known."""

    memory_id: Ints
    num_computed: Ints
    num_prompt: Ints
    tokens: Ints
    num_new: Ints


@dataclass(slots=True)
class StepDraft:
    """A step that is being put together: its shares, in two columns."""

    sequences: list[Sequence] = field(default_factory=list)
    num_new: list[int] = field(default_factory=list)
    _columns: Columns | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Share]:
        return zip(self.sequences, self.num_new, strict=True)

    def append(self, share: Share) -> None:
        sequence, num_new = share
        self.sequences.append(sequence)
        self.num_new.append(num_new)
        self._columns = None

    def pop(self) -> Share:
        self._columns = None
        return self.sequences.pop(), self.num_new.pop()

    def columns(self) -> Columns:
        """Read once: shares may come and go, their sequences stay as they are meanwhile."""
        if self._columns is None:
            numbers = _core.columns(self.sequences, Columns._fields[:-1])
            memory_id, num_computed, num_prompt, tokens = numbers
            num_new = np.array(self.num_new, dtype=np.int64)
            self._columns = Columns(memory_id, num_computed, num_prompt, tokens, num_new)
        return self._columns

    def takes_last_tokens(self) -> bool:
        """Whether each share is all that its sequence has to compute."""
        columns = self.columns()
        return np.array_equal(columns.num_computed + columns.num_new, columns.tokens)

    def drop(self, sequences: list[Sequence]) -> None:
        """Without the shares of these."""
        self._columns = None
        shares = [share for share in self if share[0] not in sequences]
        self.sequences = [sequence for sequence, _ in shares]
        self.num_new = [num_new for _, num_new in shares]


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
    #: Some of its new tokens are of its prompt.
    reads_prompt: Flags
    #: The last new token is the last known one, so that the next can be drawn.
    samples: Flags
    num_tokens: int
    memory: MemoryPlan

    @staticmethod
    def of(draft: StepDraft, columns: Columns, memory: MemoryPlan) -> StepPlan:
        return StepPlan(
            list(draft.sequences),
            memory_ids=columns.memory_id,
            num_past=columns.num_computed,
            num_new=columns.num_new,
            reads_prompt=columns.num_computed < columns.num_prompt,
            samples=columns.num_computed + columns.num_new == columns.tokens,
            num_tokens=sum(draft.num_new),
            memory=memory,
        )

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def only_decodes(self) -> bool:
        """Whether it computes the last known token of every sequence, behind its prompt."""
        num = len(self)
        if self.num_tokens != num or np.count_nonzero(self.samples) != num:
            return False
        return int(np.count_nonzero(self.reads_prompt)) == 0

    @property
    def scheduled(self) -> tuple[ScheduledSequence, ...]:
        """The columns, entry by entry."""
        columns = zip(
            self.sequences,
            self.memory_ids.tolist(),
            self.num_past.tolist(),
            self.num_new.tolist(),
            self._regimes(),
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
            self.reads_prompt[order],
            self.samples[order],
            self.num_tokens,
            self.memory,
        )

    def _regimes(self) -> list[Regime]:
        """Once the plan's conversions are done."""
        converted = {op.seq: op.regime for op in self.memory.ops if isinstance(op, Convert)}
        ids = zip(self.sequences, self.memory_ids.tolist(), strict=True)
        return [converted.get(memory_id, sequence.regime) for sequence, memory_id in ids]


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

    def schedule(self, *, ahead: bool = False) -> StepPlan | None:
        """The next step, or None when there is nothing to run.

        ``ahead``: while the last one runs, some of whose tokens are not known; then nobody gives
        way to anybody, and None says that the next step is to be asked for once they are known.

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
