"""The scheduler's interface and its decision: which sequences compute how many tokens in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vmserve.errors import OutOfMemoryError
from vmserve.memory.base import Convert, MemoryPlan, Regime
from vmserve.memory.columns import step_columns, take_unpublished
from vmserve.numbers.values import step_value
from vmserve.scheduler.sequence import Request, Sequence

__all__ = [
    "AddDrafts",
    "Columns",
    "Drafted",
    "Flags",
    "Ints",
    "MayCome",
    "NoRoomError",
    "ScheduledSequence",
    "Scheduler",
    "StepGrant",
    "StepInProgress",
    "StepPlan",
    "Totals",
    "no_drafts",
    "none_comes",
]

#: A sequence, and the number of its tokens that a step computes.
StepGrant = tuple[Sequence, int]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: Rows of :attr:`Columns.table`, in the order of ``step_columns``.
_MEMORY_ID, _NUM_COMPUTED, _NUM_PROMPT, _NUM_KNOWN, _LAST_TOKEN, _NUM_NEW = range(6)


class NoRoomError(OutOfMemoryError):
    """The request ``request_id`` can never continue: it needs more memory than there is."""

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
    #: The view that kernels use in this step.
    regime: Regime
    samples: bool


@step_value
class Columns:
    """What a step reads of its sequences, in columns of ``[sequences]``, read in one pass."""

    #: int64 ``[6, sequences]``, whose rows are the properties below.
    table: Ints
    #: int64 ``[sequences, 3]``, or 4 with drafts: rows as in :class:`vmserve.memory.base.Growth`.
    growths: Ints
    #: Whether each grant is everything that its sequence has to compute.
    takes_last: bool
    #: Whether, besides, each grant is one token after its sequence's prompt.
    only_decodes: bool
    #: Whether some sequence starts in this step: with a cached prefix, as a fork, or from host
    #: memory.
    has_starts: bool

    @staticmethod
    def of(sequences: list[Sequence], num_new: list[int] | None, window: int | None) -> Columns:
        """Read them. ``num_new``: the grants; None: one token each. ``window``: the widest
        layer's."""
        return Columns(*step_columns(sequences, num_new, window or 0))

    @property
    def memory_id(self) -> Ints:
        row: Ints = self.table[_MEMORY_ID]
        return row

    @property
    def num_computed(self) -> Ints:
        row: Ints = self.table[_NUM_COMPUTED]
        return row

    @property
    def num_prompt(self) -> Ints:
        row: Ints = self.table[_NUM_PROMPT]
        return row

    @property
    def num_known(self) -> Ints:
        row: Ints = self.table[_NUM_KNOWN]
        return row

    @property
    def last_token(self) -> Ints:
        row: Ints = self.table[_LAST_TOKEN]
        return row

    @property
    def num_new(self) -> Ints:
        row: Ints = self.table[_NUM_NEW]
        return row

    def with_drafts(self, num_drafted: Ints) -> Columns:
        """The same with so many drafted tokens after the known ones of each sequence."""
        table = self.table.copy()
        table[_NUM_NEW] += num_drafted
        growths = np.column_stack([self.growths, num_drafted])
        growths[:, 1] += num_drafted
        return Columns(table, growths, False, False, self.has_starts)

    def in_order(self, order: Ints) -> Columns:
        return Columns(
            self.table.take(order, axis=1),
            self.growths[order],
            self.takes_last,
            self.only_decodes,
            self.has_starts,
        )


@dataclass(slots=True)
class StepInProgress:
    """A step while it is put together: its grants, in two columns."""

    sequences: list[Sequence] = field(default_factory=list)
    num_new: list[int] = field(default_factory=list)
    #: Tokens kept for each sequence that is about to start: the most it may take.
    kept: dict[Sequence, int] = field(default_factory=dict)
    _columns: Columns | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[StepGrant]:
        return zip(self.sequences, self.num_new, strict=True)

    @staticmethod
    def one_token_each(sequences: list[Sequence], window: int | None) -> StepInProgress | None:
        """One token of each sequence if none has more to compute, else None."""
        columns = Columns.of(sequences, None, window)
        if not columns.takes_last:
            return None
        return StepInProgress(list(sequences), [1] * len(sequences), _columns=columns)

    def append(self, grant: StepGrant) -> None:
        sequence, num_new = grant
        self.sequences.append(sequence)
        self.num_new.append(num_new)
        self._columns = None

    def columns(self, window: int | None = None) -> Columns:
        """Read the columns, once. Grants may come and go; sequences must not change meanwhile."""
        if self._columns is None:
            self._columns = Columns.of(self.sequences, self.num_new, window)
        return self._columns

    def drop(self, sequences: list[Sequence]) -> None:
        """Remove the grants of ``sequences``."""
        self._columns = None
        grants = [grant for grant in self if grant[0] not in sequences]
        self.sequences = [sequence for sequence, _ in grants]
        self.num_new = [num_new for _, num_new in grants]


@step_value
class Drafted:
    """A draft for each sequence of a step, some of them empty, and the columns with them."""

    drafts: list[list[int]]
    columns: Columns


#: Gives the drafts of a step, or None; its columns are those of :meth:`StepInProgress.columns`.
AddDrafts = Callable[[StepInProgress, Columns], Drafted | None]


def no_drafts(step: StepInProgress, columns: Columns) -> None:
    """The step has none."""


class MayCome(Protocol):
    """Says whether memory may come soon, from elsewhere, for a step that has none."""

    def __call__(self, *, is_last_resort: bool = False) -> bool:
        """``is_last_resort``: else a request fails, not only waits."""
        ...


def none_comes(*, is_last_resort: bool = False) -> bool:
    """The memory is the scheduler's own."""
    return False


@step_value
class StepPlan:
    """One step: what is computed, and the memory that it needs.

    In columns, ``[sequences]`` each, because a step has hundreds of sequences. Sequence i computes
    ``num_new[i]`` tokens from position ``num_past[i]`` on, in memory ``memory_ids[i]``.
    """

    sequences: list[Sequence]
    columns: Columns
    num_tokens: int
    memory: MemoryPlan
    #: Tokens that each sequence computes after its known ones; empty if none does.
    drafts: tuple[list[int], ...] = ()

    @staticmethod
    def of(step: StepInProgress, columns: Columns, memory: MemoryPlan) -> StepPlan:
        return StepPlan(list(step.sequences), columns, sum(step.num_new), memory)

    @staticmethod
    def with_drafts(step: StepInProgress, drafted: Drafted, memory: MemoryPlan) -> StepPlan:
        num_tokens = sum(step.num_new) + sum(map(len, drafted.drafts))
        drafts = tuple(drafted.drafts)
        return StepPlan(list(step.sequences), drafted.columns, num_tokens, memory, drafts)

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
        """Whether every sequence computes just its last known token, after its prompt."""
        return self.columns.only_decodes

    @property
    def last_tokens(self) -> Ints:
        """The last known token of each sequence: all the input of a step that only decodes."""
        return self.columns.last_token

    @property
    def reads_prompt(self) -> Flags:
        """Which sequences compute tokens of their prompts."""
        flags: Flags = self.columns.num_computed < self.columns.num_prompt
        return flags

    @property
    def samples(self) -> Flags:
        """Which sequences compute their last known token, so that the next can be drawn."""
        flags: Flags = self.ends == self.columns.num_known
        return flags

    @property
    def ends(self) -> Ints:
        """Known tokens that each sequence has computed after the step."""
        columns = self.columns
        ends: Ints = columns.num_computed + columns.num_new
        return np.minimum(ends, columns.num_known) if self.drafts else ends

    @property
    def scheduled(self) -> tuple[ScheduledSequence, ...]:
        """The entries, one object each."""
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
        """Followers that draw their first token after this step, by the sibling whose logits they
        use.

        The sibling computes the prompt's last token in this step.
        """
        if self.only_decodes:
            return {}
        ends_prompt = self.samples & (self.columns.num_known == self.columns.num_prompt)
        computing = [self.sequences[index] for index in np.flatnonzero(ends_prompt).tolist()]
        return {seq: due for seq in computing if (due := seq.request.first_tokens_due)}

    def take_unpublished(self) -> tuple[Ints, Ints]:
        """Tokens that became known since the last call: owners and token ids, ``[tokens]`` each.

        They are for the prefix cache of the KV memory, and count as published from now on.
        """
        return take_unpublished(self.sequences, self.memory_ids)

    def in_order(self, order: Ints) -> StepPlan:
        """The same step with its entries permuted: entry i is entry ``order[i]`` of this one."""
        sequences = [self.sequences[row] for row in order.tolist()]
        drafts = tuple(self.drafts[row] for row in order.tolist()) if self.drafts else ()
        columns = self.columns.in_order(order)
        return StepPlan(sequences, columns, self.num_tokens, self.memory, drafts)

    def _regimes(self) -> list[Regime]:
        """The regime of each sequence after the plan's conversions."""
        converted = {op.seq: op.regime for op in self.memory.ops if isinstance(op, Convert)}
        ids = zip(self.sequences, self.memory_ids.tolist(), strict=True)
        return [converted.get(memory_id, sequence.regime) for sequence, memory_id in ids]


@dataclass(slots=True)
class Totals:
    """What a scheduler has done so far."""

    preemptions: int = 0
    #: Among them those for claims.
    priority_preemptions: int = 0
    fairness_preemptions: int = 0
    raised: int = 0
    swaps: int = 0

    def by_name(self) -> dict[str, int]:
        """By metric name."""
        return {
            "num_preemptions_total": self.preemptions,
            "num_priority_preemptions_total": self.priority_preemptions,
            "num_fairness_preemptions_total": self.fairness_preemptions,
            "num_priority_raised_total": self.raised,
            "num_swapped_out_total": self.swaps,
        }


class Scheduler(Protocol):
    """Owns the queues. It sees token counts and pages, never a tensor."""

    totals: Totals
    #: Whether the last step was put off because memory may come.
    awaits_memory: bool

    def add(self, request: Request) -> None: ...

    def abort(self, request: Request) -> None:
        """Drop every unfinished sequence of the request and its memory."""
        ...

    def finish(self, sequence: Sequence) -> None:
        """Release the memory of a sequence that has its last token."""
        ...

    def schedule(
        self,
        *,
        ahead: bool = False,
        add_drafts: AddDrafts = no_drafts,
        may_come: MayCome = none_comes,
    ) -> StepPlan | None:
        """The next step, or None if there is nothing to run.

        ``add_drafts`` is asked for drafts, perhaps several times; the step has them where there is
        memory for them. ``may_come`` is asked where there is no memory; :attr:`awaits_memory` then
        says that the step was put off.

        ``ahead``: the last step still runs and some of its tokens are unknown. Nothing is preempted
        then, and None means: ask again when the tokens are known.

        Raises :class:`NoRoomError` if a request does not fit even alone, so that waiting is
        useless.
        """
        ...

    def applied(self, plan: StepPlan) -> None:
        """The plan's memory operations are done: forks, cached prefixes, conversions."""
        ...

    def computed(self, plan: StepPlan) -> None:
        """The plan's tokens are in the KV cache."""
        ...

    def accepted(self, sequence: Sequence, num_accepted: int) -> None:
        """Drafted tokens that the last step computed are known now."""
        ...

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Run ``child``, starting as a fork of everything that ``parent`` has computed."""
        ...

    def convert(self, request: Request, regime: Regime, reason: str = "converted") -> None:
        """Keep the request in ``regime``, from the next step on that has memory for it."""
        ...

    def suspect(self) -> str | None:
        """The request to end if planning raised an exception that names none; None: there is no
        request."""
        ...

    def start_over(self, requests: Iterable[Request], ended: Iterable[Request]) -> None:
        """Queue ``requests`` anew, and nothing else, also after a call that ended halfway.

        They are computed again, as after a preemption. All memory must have been released.
        """
        ...

    def make_room(self) -> bool:
        """Free memory after the system refused some; False if only one request runs."""
        ...

    def give_way(self) -> bool:
        """Preempt the last arrival for memory that is to go elsewhere; False if it runs alone."""
        ...

    def wanted_pages(self) -> int:
        """Pages that running sequences lack for what they know, and that those need that wait for
        memory alone."""
        ...

    @property
    def num_running(self) -> int: ...

    @property
    def running_request_ids(self) -> list[str]:
        """Requests with running sequences, in order of arrival."""
        ...

    @property
    def num_waiting(self) -> int: ...
