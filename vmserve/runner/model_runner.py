"""Runs the model over one step's ragged batch and returns the logits that are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vmserve.attention.base import AttentionBackend, ContiguousView, RaggedBatch
from vmserve.scheduler.base import ScheduledSequence, StepPlan

if TYPE_CHECKING:
    from vmserve.models import LoadedModel

__all__ = ["ModelRunner", "StepLogits"]


@dataclass(frozen=True)
class PromptRows:
    """Rows of ``StepLogits.logits`` that score ``targets``, prompt tokens of ``item``."""

    item: ScheduledSequence
    first_row: int
    targets: list[int]


@dataclass(frozen=True)
class StepLogits:
    """``logits``: ``[rows, vocab]`` float32; row ``sample_rows[i]`` samples for ``samplers[i]``."""

    logits: torch.Tensor
    samplers: tuple[ScheduledSequence, ...]
    sample_rows: tuple[int, ...]
    prompt_rows: tuple[PromptRows, ...]

    def sampling_logits(self) -> torch.Tensor:
        """``[samplers, vocab]``; without a copy when nothing but samples was asked for."""
        if not self.prompt_rows:
            return self.logits
        return self.logits[list(self.sample_rows)]


class ModelRunner:
    """Knows tensors, not queues: a step's plan in, logits out."""

    def __init__(self, model: LoadedModel, view: ContiguousView, backend: AttentionBackend) -> None:
        self._model = model
        self._view = view
        self._backend = backend

    @torch.inference_mode()
    def execute(self, plan: StepPlan, slots: list[int]) -> StepLogits:
        """``slots``: where the plan's sequences lie in the view, in its order."""
        items = plan.scheduled
        batch = RaggedBatch.build(
            slots,
            [item.num_past for item in items],
            [item.num_new for item in items],
        )
        token_ids: list[int] = []
        for item in items:
            token_ids += item.sequence.tokens[item.num_past : item.num_past + item.num_new]
        rows, samplers, sample_rows, prompt_rows = _rows_wanted(items, batch.starts)
        logits = self._model.forward(
            torch.tensor(token_ids, dtype=torch.int64),
            batch.token_positions,
            self._backend.bind(self._view, batch),
            torch.tensor(rows, dtype=torch.int64),
        )
        return StepLogits(logits, samplers, sample_rows, prompt_rows)


def _rows_wanted(
    items: tuple[ScheduledSequence, ...], starts: tuple[int, ...]
) -> tuple[list[int], tuple[ScheduledSequence, ...], tuple[int, ...], tuple[PromptRows, ...]]:
    """Which rows of the ragged batch go through the LM head, and for whom."""
    rows: list[int] = []
    samplers: list[ScheduledSequence] = []
    sample_rows: list[int] = []
    prompt_rows: list[PromptRows] = []
    for item, start in zip(items, starts, strict=True):
        scored = _prompt_positions(item)
        if scored:
            targets = item.sequence.tokens[scored.start + 1 : scored.stop + 1]
            prompt_rows.append(PromptRows(item, len(rows), targets))
            rows.extend(start + position - item.num_past for position in scored)
        if item.samples:
            samplers.append(item)
            sample_rows.append(len(rows))
            rows.append(start + item.num_new - 1)
    return rows, tuple(samplers), tuple(sample_rows), tuple(prompt_rows)


def _prompt_positions(item: ScheduledSequence) -> range:
    """Positions in this chunk whose logits score the next prompt token, not scored before."""
    sequence = item.sequence
    if sequence.request.params.prompt_logprobs is None or sequence.index != 0:
        return range(0)
    first = max(item.num_past, sequence.num_prompt_scored)
    last = min(item.num_past + item.num_new, sequence.num_prompt - 1)
    return range(first, max(first, last))
