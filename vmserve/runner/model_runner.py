"""Runs the model over one step's ragged batch and returns the logits that are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from vmserve.attention.base import (
    AttentionBackend,
    AttentionCall,
    KVView,
    LayerAttention,
    RaggedBatch,
)
from vmserve.errors import ConfigurationError
from vmserve.memory.base import Regime
from vmserve.scheduler.base import ScheduledSequence, StepPlan
from vmserve.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from vmserve.attention.rotary import Rotary
    from vmserve.models import LoadedModel

__all__ = ["ModelRunner", "RegimeKernels", "StepLogits"]


@dataclass(frozen=True)
class RegimeKernels:
    """The kernels of one regime and the view that they read; paired once, at start."""

    backend: AttentionBackend
    view: KVView

    def __post_init__(self) -> None:
        if not isinstance(self.view, self.backend.views):
            raise ConfigurationError(
                f"the attention backend {self.backend.name} cannot read the "
                f"{type(self.view).__name__}: choose another --attention-backend"
            )


@dataclass(frozen=True)
class PromptRows:
    """Rows of ``StepLogits.logits`` that score ``targets``, prompt tokens of ``item``."""

    item: ScheduledSequence
    first_row: int
    targets: list[int]


@dataclass(frozen=True)
class StepLogits:
    """``logits``: ``[rows, vocab]`` float32.

    Row ``sample_rows[i]`` samples for ``samplers[i]`` (sequences of one request that draw their
    first token have the same row), row ``beam_rows[i]`` has the candidates of ``beams[i]``.
    """

    logits: torch.Tensor
    samplers: tuple[Sequence, ...]
    sample_rows: tuple[int, ...]
    beams: tuple[Sequence, ...]
    beam_rows: tuple[int, ...]
    prompt_rows: tuple[PromptRows, ...]

    def sampling_logits(self) -> torch.Tensor:
        """``[samplers, vocab]``"""
        return self._rows(self.sample_rows)

    def beam_logits(self) -> torch.Tensor:
        """``[beams, vocab]``"""
        return self._rows(self.beam_rows)

    def _rows(self, rows: tuple[int, ...]) -> torch.Tensor:
        """Without a copy where these are all there are."""
        if rows == tuple(range(self.logits.shape[0])):
            return self.logits
        return self.logits[list(rows)]


class ModelRunner:
    """Knows tensors, not queues: a step's plan in, logits out.

    A batch may hold sequences of both regimes: each layer calls the kernels of each on its part.
    """

    def __init__(self, model: LoadedModel, kernels: Mapping[Regime, RegimeKernels]) -> None:
        self._model = model
        self._kernels = kernels

    @torch.inference_mode()
    def execute(self, plan: StepPlan, places: list[int]) -> StepLogits:
        """``places``: the slot, or the row of the block tables, of each scheduled sequence."""
        # One stretch of rows for each regime; within it the order of the plan.
        order = sorted(range(len(places)), key=lambda i: plan.scheduled[i].regime.value)
        items = tuple(plan.scheduled[i] for i in order)
        parts = _parts(items, [places[i] for i in order], self._kernels)
        token_ids: list[int] = []
        starts: list[int] = []
        for item in items:
            starts.append(len(token_ids))
            token_ids += item.sequence.tokens[item.num_past : item.num_past + item.num_new]
        wanted = _rows_wanted(items, starts)
        logits = self._model.forward(
            torch.tensor(token_ids, dtype=torch.int64),
            torch.cat([part.batch.token_positions for part in parts]),
            parts[0].call if len(parts) == 1 else _MixedCall(parts),
            torch.tensor(wanted.rows, dtype=torch.int64),
        )
        return StepLogits(
            logits,
            tuple(wanted.samplers),
            tuple(wanted.sample_rows),
            tuple(wanted.beams),
            tuple(wanted.beam_rows),
            tuple(wanted.prompt_rows),
        )


@dataclass(frozen=True)
class _Part:
    """The sequences of one regime: rows ``first : first + batch.num_tokens`` of the batch."""

    first: int
    batch: RaggedBatch
    call: AttentionCall


def _parts(
    items: tuple[ScheduledSequence, ...],
    places: list[int],
    kernels: Mapping[Regime, RegimeKernels],
) -> list[_Part]:
    parts: list[_Part] = []
    first = 0
    for regime, group in groupby(zip(items, places, strict=True), lambda pair: pair[0].regime):
        members = list(group)
        batch = RaggedBatch.build(
            [place for _, place in members],
            [item.num_past for item, _ in members],
            [item.num_new for item, _ in members],
        )
        chosen = kernels[regime]
        parts.append(_Part(first, batch, chosen.backend.bind(chosen.view, batch)))
        first += batch.num_tokens
    return parts


class _MixedCall:
    """Both regimes in one batch: each backend is called once per layer, on its rows."""

    def __init__(self, parts: list[_Part]) -> None:
        self._calls = [
            (part.call, part.first, part.first + part.batch.num_tokens) for part in parts
        ]

    def __call__(
        self,
        spec: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        outputs = []
        for call, first, end in self._calls:
            part = None if rotary is None else rotary.rows(first, end)
            outputs.append(call(spec, q[first:end], k[first:end], v[first:end], part))
        return torch.cat(outputs)


@dataclass
class _Wanted:
    """Rows of the ragged batch that go through the LM head, and for whom."""

    rows: list[int] = field(default_factory=list)
    samplers: list[Sequence] = field(default_factory=list)
    sample_rows: list[int] = field(default_factory=list)
    beams: list[Sequence] = field(default_factory=list)
    beam_rows: list[int] = field(default_factory=list)
    prompt_rows: list[PromptRows] = field(default_factory=list)


def _rows_wanted(items: tuple[ScheduledSequence, ...], starts: list[int]) -> _Wanted:
    wanted = _Wanted()
    rows = wanted.rows
    for item, start in zip(items, starts, strict=True):
        scored = _prompt_positions(item)
        if scored:
            targets = item.sequence.tokens[scored.start + 1 : scored.stop + 1]
            wanted.prompt_rows.append(PromptRows(item, len(rows), targets))
            rows.extend(start + position - item.num_past for position in scored)
        if not item.samples:
            continue
        sequence = item.sequence
        if sequence.request.beams is not None:
            wanted.beams.append(sequence)
            wanted.beam_rows.append(len(rows))
        else:
            drawing = [sequence]
            if sequence.num_output == 0:
                drawing += sequence.request.first_tokens_due
            wanted.samplers += drawing
            wanted.sample_rows += [len(rows)] * len(drawing)
        rows.append(start + item.num_new - 1)
    return wanted


def _prompt_positions(item: ScheduledSequence) -> range:
    """Positions in this chunk whose logits score the next prompt token, not scored before."""
    sequence = item.sequence
    if sequence.request.params.prompt_logprobs is None or sequence.index != 0:
        return range(0)
    first = max(item.num_past, sequence.num_prompt_scored)
    last = min(item.num_past + item.num_new, sequence.num_prompt - 1)
    return range(first, max(first, last))
