"""What a scheduler decides: which sequences compute how many tokens in this step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vmserve.errors import OutOfMemoryError
from vmserve.memory.base import Convert, MemoryPlan, Regime
from vmserve.memory.columns import step_columns, take_unpublished
from vmserve.scheduler.sequence import Request, Sequence

__all__ = [
    "Columns",
    "Flags",
    "Ints",
    "NoRoomError",
    "ScheduledSequence",
    "Scheduler",
    "StepDraft",
    "StepGrant",
    "StepPlan",
]

#: A sequence and how many of its tokens a step computes.
StepGrant = tuple[Sequence, int]
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


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """What a step needs to know of its sequences, ``[sequences]`` each, read in one pass."""

    #: int64 ``[6, sequences]``: the properties' rows.
    table: Ints
    #: int64 ``[sequences, 3]``, as :class:`vmserve.memory.base.Growth` has them.
    growths: Ints
    #: Each grant is all that its sequence has to compute.
    takes_last: bool
    #: And is one token, behind the sequence's prompt.
    only_decodes: bool
    #: A sequence starts in this step: with a prefix, as a fork, or from host memory.
    has_starts: bool

    @staticmethod
    def of(sequences: list[Sequence], num_new: list[int] | None, window: int | None) -> Columns:
        """``num_new``: the grants; None: one token of each. ``window``: the widest layer's."""
        return Columns(*step_columns(sequences, num_new, window or 0))

    @property
    def memory_id(self) -> Ints:
        row: Ints = self.table[0]
        return row

    @property
    def num_computed(self) -> Ints:
        row: Ints = self.table[1]
        return row

    @property
    def num_prompt(self) -> Ints:
        row: Ints = self.table[2]
        return row

    @property
    def num_known(self) -> Ints:
        row: Ints = self.table[3]
        return row

    @property
    def last_token(self) -> Ints:
        row: Ints = self.table[4]
        return row

    @property
    def num_new(self) -> Ints:
        row: Ints = self.table[5]
        return row

    def in_order(self, order: Ints) -> Columns:
        return Columns(
            self.table.take(order, axis=1),
            self.growths[order],
            self.takes_last,
            self.only_decodes,
            self.has_starts,
        )


@dataclass(slots=True)
class StepDraft:
    """A step that is being put together: its grants, in two columns."""

    sequences: list[Sequence] = field(default_factory=list)
    num_new: list[int] = field(default_factory=list)
    #: The most that sequences about to begin may take: it was kept for them.
    kept: dict[Sequence, int] = field(default_factory=dict)
    _columns: Columns | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[StepGrant]:
        return zip(self.sequences, self.num_new, strict=True)

    @staticmethod
    def of_everybody(sequences: list[Sequence], window: int | None) -> StepDraft | None:
        """One token of each, where that is all that they have to compute; else None."""
        columns = Columns.of(sequences, None, window)
        if not columns.takes_last:
            return None
        return StepDraft(list(sequences), [1] * len(sequences), _columns=columns)

    def append(self, grant: StepGrant) -> None:
        sequence, num_new = grant
        self.sequences.append(sequence)
        self.num_new.append(num_new)
        self._columns = None

    def pop(self) -> StepGrant:
        self._columns = None
        return self.sequences.pop(), self.num_new.pop()

    def columns(self, window: int | None = None) -> Columns:
        """Read once. Grants may come and go; their sequences do not change meanwhile."""
        if self._columns is None:
            self._columns = Columns.of(self.sequences, self.num_new, window)
        return self._columns

    def drop(self, sequences: list[Sequence]) -> None:
        """Remove the grants of these."""
        self._columns = None
        grants = [grant for grant in self if grant[0] not in sequences]
        self.sequences = [sequence for sequence, _ in grants]
        self.num_new = [num_new for _, num_new in grants]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step: what is computed and the memory that it needs.

    In columns, ``[sequences]`` each, as a step is made of hundreds of sequences: ``num_new`` tokens
    are computed, from position ``num_past`` on, with the keys and values of ``memory_ids``.
    """

    sequences: list[Sequence]
    columns: Columns
    num_tokens: int
    memory: MemoryPlan

    @staticmethod
    def of(draft: StepDraft, columns: Columns, memory: MemoryPlan) -> StepPlan:
        return StepPlan(list(draft.sequences), columns, sum(draft.num_new), memory)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def memory_ids(self) -> Ints:
        return self.columns.memory_id

    @property
    def num_past(self) -> Ints:
        return self.columns.num_computed

    @property
    def num_new(self) -> Ints:
        return self.columns.num_new

    @property
    def only_decodes(self) -> bool:
        """Whether it computes the last known token of every sequence, behind its prompt."""
        return self.columns.only_decodes

    @property
    def last_tokens(self) -> Ints:
        """The last known token of each sequence: all that a step computes that only decodes."""
        return self.columns.last_token

    @property
    def reads_prompt(self) -> Flags:
        """Some of its new tokens are of its prompt."""
        flags: Flags = self.columns.num_computed < self.columns.num_prompt
        return flags

    @property
    def samples(self) -> Flags:
        """The last new token is the last known one, so that the next can be drawn."""
        columns = self.columns
        flags: Flags = columns.num_computed + columns.num_new == columns.num_known
        return flags

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

    def first_draws(self) -> dict[Sequence, list[Sequence]]:
        """Followers that draw their first token after this step, by the sequence whose logits
        they draw it from: it computes the prompt's end."""
        if self.only_decodes:
            return {}
        ends_prompt = self.samples & (self.columns.num_known == self.columns.num_prompt)
        computing = [self.sequences[index] for index in np.flatnonzero(ends_prompt).tolist()]
        return {seq: due for seq in computing if (due := seq.request.first_tokens_due)}

    def take_unpublished(self) -> tuple[Ints, Ints]:
        """Tokens of its sequences that became known and that the KV memory has not been told,
        ``[tokens]`` each: whose they are, and which. They count as told from here on."""
        return take_unpublished(self.sequences, self.memory_ids)

    def in_order(self, order: Ints) -> StepPlan:
        """The same step; entry ``order[i]`` of each column is its ``i``-th."""
        sequences = [self.sequences[row] for row in order.tolist()]
        return StepPlan(sequences, self.columns.in_order(order), self.num_tokens, self.memory)

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
