"""Run the model over a step's ragged batch; return the logits that are needed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from vmserve.attention.base import AttentionCall, LayerAttention, RaggedBatch
from vmserve.attention.states import StepStates
from vmserve.memory.base import Regime
from vmserve.models.hidden import HiddenRows
from vmserve.numbers.values import step_value
from vmserve.runner.host import NO_CONTEXT
from vmserve.runner.runtime import CaptureError
from vmserve.scheduler.base import StepPlan
from vmserve.scheduler.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from vmserve.attention.rotary import Rotary
    from vmserve.models import LoadedModel
    from vmserve.runner.kernels import RegimeKernels
    from vmserve.runner.runtime import DeviceRuntime, StepGraphs
    from vmserve.sampling.tokens import Logits

__all__ = [
    "Alone",
    "AttentionTime",
    "ModelRunner",
    "OtherRanks",
    "Runner",
    "StepColumns",
    "StepLogits",
    "null_logits",
]


class AttentionTime(NamedTuple):
    """Seconds of attention in a step for the sequences of one regime, ``batch``."""

    regime: Regime
    batch: RaggedBatch
    seconds: float


@dataclass(frozen=True)
class PromptRows:
    """Rows of ``StepLogits.logits`` that score ``targets``, prompt tokens of ``sequence``."""

    sequence: Sequence
    first_row: int
    targets: list[int]


@dataclass(frozen=True)
class PooledRows:
    """Rows of ``StepLogits.hidden`` that belong to the embedding of ``sequence``'s prompt."""

    sequence: Sequence
    first_row: int
    num_rows: int


@step_value
class StepLogits:
    """The logits of a step: ``[rows, vocab]`` float32.

    Row ``sample_rows[i]`` samples for ``samplers[i]`` (sequences of one request that draw their
    first token have the same row). Row ``beam_rows[i]`` has the candidates of ``beams[i]``.
    """

    logits: Logits
    samplers: tuple[Sequence, ...]
    sample_rows: tuple[int, ...]
    beams: tuple[Sequence, ...]
    beam_rows: tuple[int, ...]
    prompt_rows: tuple[PromptRows, ...]
    #: Attention time, for each regime in the step.
    attention: tuple[AttentionTime, ...]
    #: Prompts for which embeddings are wanted, and their final hidden states.
    pooled_rows: tuple[PooledRows, ...] = ()
    hidden: HiddenRows | None = None
    #: Drafts that were computed. ``samplers`` has their sequences once for the known tokens and
    #: once after each drafted one, in order.
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)

    def sampling_logits(self, runtime: DeviceRuntime) -> Logits:
        """``[samplers, vocab]``"""
        rows = self.sample_rows
        return self.logits if self._is_all(rows) else runtime.rows(self.logits, rows)

    def beam_logits(self) -> Logits:
        """``[beams, vocab]``"""
        return self.logits if self._is_all(self.beam_rows) else self.logits[list(self.beam_rows)]

    def _is_all(self, rows: tuple[int, ...]) -> bool:
        """Whether these rows are all rows, so that no copy is needed."""
        return rows == tuple(range(self.logits.shape[0]))

    def of_running(self) -> StepLogits:
        """The same without sequences that have ended since the step was launched."""
        some = (*self.samplers, *self.beams, *(rows.sequence for rows in self.prompt_rows))
        if not any(_has_ended(sequence) for sequence in some):
            return self
        draws = [not _has_ended(sequence) for sequence in self.samplers]
        searches = [not _has_ended(sequence) for sequence in self.beams]
        return replace(
            self,
            samplers=tuple(compress(self.samplers, draws)),
            sample_rows=tuple(compress(self.sample_rows, draws)),
            beams=tuple(compress(self.beams, searches)),
            beam_rows=tuple(compress(self.beam_rows, searches)),
            prompt_rows=tuple(row for row in self.prompt_rows if not _has_ended(row.sequence)),
            pooled_rows=tuple(row for row in self.pooled_rows if not _has_ended(row.sequence)),
        )

    def without_logits(self) -> StepLogits:
        """The same without the numbers, whose memory may be needed."""
        return replace(self, logits=_NO_LOGITS)


_NO_LOGITS: NDArray[np.float32] = np.empty((0, 0), dtype=np.float32)


def _has_ended(sequence: Sequence) -> bool:
    return sequence.status is SequenceStatus.FINISHED


@step_value
class StepColumns:
    """What all ranks compute of a step."""

    #: Tokens, int64 ``[num_tokens]``.
    token_ids: NDArray[np.int64]
    #: Batch of each regime; their rows follow each other.
    stretches: list[tuple[Regime, RaggedBatch]]
    #: Rows that go through the LM head, int64; None: all, in order.
    logits_rows: NDArray[np.int64] | None
    #: Number of the last of these rows that want final hidden states instead.
    num_hidden: int


class OtherRanks(Protocol):
    """The other ranks, which compute what rank 0 does."""

    def computing(self, columns: StepColumns) -> AbstractContextManager[None]:
        """Tell them of a step; in the context, rank 0 computes it too.

        Raises :class:`~vmserve.errors.RankLostError` if one of them, or rank 0, does not.
        """
        ...


class Alone:
    """No other ranks."""

    def computing(self, columns: StepColumns) -> AbstractContextManager[None]:
        return NO_CONTEXT


class Runner(Protocol):
    """Executes step plans: :class:`ModelRunner`, or one without a model."""

    def execute(
        self, plan: StepPlan, slots: NDArray[np.int32], drawn: torch.Tensor | None = None
    ) -> StepLogits: ...


class ModelRunner:
    """Executes step plans with a model. Knows tensors, not queues.

    A batch may have sequences of both regimes: each layer calls the kernels of each on its part.
    """

    def __init__(
        self,
        model: LoadedModel,
        kernels: Mapping[Regime, RegimeKernels],
        runtime: DeviceRuntime,
        graphs: StepGraphs | None = None,
        others: OtherRanks | None = None,
    ) -> None:
        self.model = model
        self._others = others or Alone()
        self._kernels = kernels
        self._runtime = runtime
        self._graphs = graphs
        #: Pages of the states, which are the same in either view.
        self._states = next((each.view.states for each in kernels.values()), None)
        #: The step that has begun, and its states.
        self._begun: tuple[StepPlan, StepStates] | None = None

    def execute(
        self, plan: StepPlan, slots: NDArray[np.int32], drawn: torch.Tensor | None = None
    ) -> StepLogits:
        """Compute a step. ``slots``: of each sequence; -1: kernels find it by its block table row.

        ``drawn``: int64, on the device: the values of the placeholders -1, -2, … in sequences.

        A plan whose computation failed may be given again, before any other one.

        On a GPU, the work is given to the engine's stream, and this does not wait for it.
        """
        self._runtime.check()
        with self._runtime.inference():
            return self._execute(plan, slots, drawn)

    def _execute(
        self, plan: StepPlan, slots: NDArray[np.int32], drawn: torch.Tensor | None
    ) -> StepLogits:
        num_paged, whole = int(np.count_nonzero(slots < 0)), plan
        if 0 < num_paged < len(plan):
            # One stretch of rows for each regime; within it the order of the plan.
            order = np.argsort(slots >= 0, kind="stable")
            plan, slots = plan.in_order(order), slots[order]
        only_decodes = plan.only_decodes
        wanted = _every_row(plan) if only_decodes else _rows_wanted(plan)
        if only_decodes and self._graphs is not None and self._graphs.takes(len(plan)):
            with contextlib.suppress(CaptureError):
                return self._replay(plan, slots, num_paged, wanted, self._graphs, drawn)
        rows = None
        if not only_decodes:
            rows = np.array(wanted.rows + wanted.hidden_rows, dtype=np.int64)
        columns = StepColumns(
            _new_tokens(plan),
            _stretches(plan, slots, num_paged),
            rows,
            len(wanted.hidden_rows),
        )
        with self._others.computing(columns):
            logits, parts, hidden = self._compute(columns, drawn, whole)
        self._begun = None
        return _step_logits(logits, wanted, self._times(parts), hidden)

    def follow(self, columns: StepColumns) -> None:
        """Compute a rank's part of a step of rank 0's, which has the results."""
        self._runtime.check()
        with self._runtime.inference():
            self._compute(columns, None, None)

    def _compute(
        self, columns: StepColumns, drawn: torch.Tensor | None, plan: StepPlan | None
    ) -> tuple[Logits, list[_Part], HiddenRows | None]:
        """``plan``: whose sequences' states there are."""
        parts = _bound(columns.stretches, self._kernels)
        hidden = HiddenRows(columns.num_hidden) if columns.num_hidden else None
        logits = self._runtime.forward(
            self.model,
            columns.token_ids,
            _positions(parts),
            parts[0].call if len(parts) == 1 else _MixedCall(parts),
            columns.logits_rows,
            drawn,
            hidden,
            None if plan is None else self._states_of(plan, parts),
        )
        return logits, parts, hidden

    def _states_of(self, plan: StepPlan, parts: list[_Part]) -> StepStates | None:
        if self._states is None:
            return None
        if self._begun is None or self._begun[0] is not plan:
            states = StepStates.of(self._states, [part.batch for part in parts])
            self._begun = plan, states
        return self._begun[1]

    def _replay(
        self,
        plan: StepPlan,
        slots: NDArray[np.int32],
        num_paged: int,
        wanted: _Wanted,
        graphs: StepGraphs,
        drawn: torch.Tensor | None,
    ) -> StepLogits:
        """Replay a captured step, or capture it now. With both regimes, all but attention."""
        token_ids = plan.last_tokens
        stretches = _stretches(plan, slots, num_paged)
        if len(stretches) == 1 and graphs.captures_attention(stretches[0][0]):
            [(regime, batch)] = stretches
            return _step_logits(graphs.whole(token_ids, regime, batch, drawn), wanted, ())
        parts = _bound(stretches, self._kernels)
        attention = parts[0].call if len(parts) == 1 else _MixedCall(parts)
        logits = graphs.in_pieces(token_ids, plan.num_past, attention, drawn)
        return _step_logits(logits, wanted, self._times(parts))

    def _times(self, parts: list[_Part]) -> tuple[AttentionTime, ...]:
        """Attention times; only of kernels that are done when their call returns, so none on a
        GPU."""
        if self._runtime.device_type != "cpu":
            return ()
        return tuple(AttentionTime(part.regime, part.batch, part.call.seconds) for part in parts)


def null_logits(plan: StepPlan) -> StepLogits:
    """The logits of a runner without a model: sequences as in a real step, and empty rows."""
    wanted = _every_row(plan) if plan.only_decodes else _rows_wanted(plan)
    return _step_logits(np.empty((len(wanted.rows), 0), dtype=np.float32), wanted, ())


def _step_logits(
    logits: Logits,
    wanted: _Wanted,
    attention: tuple[AttentionTime, ...],
    hidden: HiddenRows | None = None,
) -> StepLogits:
    return StepLogits(
        logits,
        tuple(wanted.samplers),
        tuple(wanted.sample_rows),
        tuple(wanted.beams),
        tuple(wanted.beam_rows),
        tuple(wanted.prompt_rows),
        attention,
        tuple(wanted.pooled_rows),
        hidden,
        wanted.drafts,
    )


@step_value
class _Part:
    """The sequences of one regime: rows ``first : first + batch.num_tokens`` of the batch."""

    regime: Regime
    first: int
    batch: RaggedBatch
    call: _TimedCall


def _new_tokens(plan: StepPlan) -> NDArray[np.int64]:
    """``[num_tokens]``; a copy, because the model must not write the plan's columns."""
    if plan.only_decodes:
        return plan.last_tokens.copy()
    token_ids: list[int] = []
    spans = zip(plan.sequences, plan.num_past.tolist(), plan.ends.tolist(), strict=True)
    for place, (sequence, num_past, end) in enumerate(spans):
        token_ids += sequence.tokens[num_past:end]
        if plan.drafts:
            token_ids += plan.drafts[place]
    return np.array(token_ids, dtype=np.int64)


def _positions(parts: list[_Part]) -> NDArray[np.int64]:
    positions = [part.batch.positions for part in parts]
    return positions[0] if len(parts) == 1 else np.concatenate(positions)


def _stretches(
    plan: StepPlan, slots: NDArray[np.int32], num_paged: int
) -> list[tuple[Regime, RaggedBatch]]:
    """The batch of each regime; the first ``num_paged`` sequences are paged."""
    ids, past, new = plan.memory_ids, plan.num_past, plan.num_new
    if num_paged in (0, len(plan)):
        regime, places = (Regime.PAGED, ids) if num_paged else (Regime.VIRTUAL, slots)
        return [(regime, RaggedBatch(places.astype(np.int64), past, new, plan.num_tokens, ids))]
    paged, virtual = slice(num_paged), slice(num_paged, None)
    return [
        (regime, RaggedBatch.build(places[part], past[part], new[part], ids[part]))
        for regime, places, part in (
            (Regime.PAGED, ids, paged),
            (Regime.VIRTUAL, slots, virtual),
        )
    ]


def _bound(
    stretches: list[tuple[Regime, RaggedBatch]], kernels: Mapping[Regime, RegimeKernels]
) -> list[_Part]:
    parts: list[_Part] = []
    first = 0
    for regime, batch in stretches:
        chosen = kernels[regime]
        began = time.perf_counter()
        call = chosen.backend.bind(chosen.view, batch)
        timed = _TimedCall(call, time.perf_counter() - began)
        parts.append(_Part(regime, first, batch, timed))
        first += batch.num_tokens
    return parts


class _TimedCall:
    """Adds up the time of one regime's kernels in a step: all layers and the binding."""

    __slots__ = ("call", "seconds")

    def __init__(self, call: AttentionCall, seconds: float) -> None:
        self.call = call
        self.seconds = seconds

    @property
    def parts(self) -> list[_TimedCall]:
        """The calls of each regime, for models that attend to all of them at once."""
        return [self]

    def __call__(
        self,
        spec: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        began = time.perf_counter()
        out = self.call(spec, q, k, v, rotary)
        self.seconds += time.perf_counter() - began
        return out


class _MixedCall:
    """Attention of a batch with both regimes: each layer calls each backend on its rows."""

    def __init__(self, parts: list[_Part]) -> None:
        self._calls = [
            (part.call, part.first, part.first + part.batch.num_tokens) for part in parts
        ]

    @property
    def parts(self) -> list[_TimedCall]:
        """Parts in the order of their rows."""
        return [call for call, _, _ in self._calls]

    def __call__(
        self,
        spec: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        out = q.new_empty(*q.shape[:-1], spec.value_dim or q.shape[-1])
        for call, first, end in self._calls:
            part = None if rotary is None else rotary.rows(first, end)
            out[first:end] = call(spec, q[first:end], k[first:end], v[first:end], part)
        return out


@dataclass
class _Wanted:
    """Rows of the ragged batch that go through the LM head, and their sequences."""

    rows: list[int] = field(default_factory=list)
    samplers: list[Sequence] = field(default_factory=list)
    sample_rows: list[int] = field(default_factory=list)
    beams: list[Sequence] = field(default_factory=list)
    beam_rows: list[int] = field(default_factory=list)
    prompt_rows: list[PromptRows] = field(default_factory=list)
    #: Rows whose final hidden states are needed, and their sequences.
    hidden_rows: list[int] = field(default_factory=list)
    pooled_rows: list[PooledRows] = field(default_factory=list)
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)

    def add(
        self,
        sequence: Sequence,
        num_past: int,
        end: int,
        last_row: int,
        draw_with: list[Sequence] | None,
    ) -> None:
        """Add a sequence that computes positions ``num_past`` to ``end``, the last in ``last_row``.

        ``draw_with``: sequences that draw from the same row.
        """
        if num_past < sequence.num_prompt:
            scored = _prompt_positions(sequence, num_past, end)
            if scored:
                targets = sequence.tokens[scored.start + 1 : scored.stop + 1]
                self.prompt_rows.append(PromptRows(sequence, len(self.rows), targets))
                self.rows.extend(last_row + 1 - end + position for position in scored)
            pooled = _pooled_positions(sequence, num_past, end)
            if pooled:
                rows = PooledRows(sequence, len(self.hidden_rows), len(pooled))
                self.pooled_rows.append(rows)
                self.hidden_rows.extend(last_row + 1 - end + position for position in pooled)
        if end < len(sequence.tokens):
            return  # the next token is known
        if sequence.request.beams is not None:
            self.beams.append(sequence)
            self.beam_rows.append(len(self.rows))
        else:
            drawing = [sequence, *(draw_with or ())]
            self.samplers += drawing
            self.sample_rows += [len(self.rows)] * len(drawing)
        self.rows.append(last_row)

    def add_draft(self, sequence: Sequence, last_row: int, draft: list[int]) -> None:
        """Add the rows of a draft after ``last_row``, that of the last known token."""
        self.drafts[sequence] = draft
        self.samplers += [sequence] * len(draft)
        self.sample_rows += range(len(self.rows), len(self.rows) + len(draft))
        self.rows += range(last_row + 1, last_row + 1 + len(draft))


def _every_row(plan: StepPlan) -> _Wanted:
    """The rows of a step that only decodes: one for each sequence."""
    rows = list(range(len(plan)))
    beams = [sequence for sequence in plan.sequences if sequence.request.beams is not None]
    return _rows_wanted(plan) if beams else _Wanted(rows, plan.sequences, rows)


def _rows_wanted(plan: StepPlan) -> _Wanted:
    wanted = _Wanted()
    first_draws = plan.first_draws()
    past, ends = plan.num_past, plan.ends
    # Rows of the known tokens: drafted ones follow.
    last_rows = np.cumsum(plan.num_new) - 1 - (past + plan.num_new - ends)
    spans = zip(plan.sequences, past.tolist(), ends.tolist(), last_rows.tolist(), strict=True)
    for place, (sequence, num_past, end, last_row) in enumerate(spans):
        wanted.add(sequence, num_past, end, last_row, first_draws.get(sequence))
        if plan.drafts and (draft := plan.drafts[place]):
            wanted.add_draft(sequence, last_row, draft)
    return wanted


def _prompt_positions(sequence: Sequence, num_past: int, end: int) -> range:
    """Positions in this chunk whose logits score the next prompt token and were not taken
    before."""
    if sequence.request.params.prompt_logprobs is None or sequence.index != 0:
        return range(0)
    first = max(num_past, sequence.num_prompt_scored)
    last = min(end, sequence.num_prompt - 1)
    return range(first, max(first, last))


def _pooled_positions(sequence: Sequence, num_past: int, end: int) -> range:
    """Positions in this chunk whose hidden states belong to an embedding and were not taken
    before."""
    pooling = sequence.request.params.pooling
    if pooling is None:
        return range(0)
    last = sequence.num_prompt - 1
    first = max(num_past, sequence.num_prompt_scored, last if pooling == "last" else 0)
    return range(first, max(first, min(end, last + 1)))
