"""Drafts in steps: what is added to a step, which rows the sampler gets, what is kept afterwards.

A step that drafts computes a sequence's last known token and drafted ones after it. Each row draws
its token as if the drafted tokens before it were known; a draft is accepted as long as it is what
the row before it drew (``docs/decisions/0048-drafts-in-steps.md``).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import numpy as np

from vmserve.engine.parts import most_scored
from vmserve.scheduler.base import Drafted

if TYPE_CHECKING:
    from vmserve.engine.build import EngineParts
    from vmserve.memory.manager import MemoryManager
    from vmserve.runner.model_runner import AttentionTime
    from vmserve.scheduler.base import Columns, Scheduler, StepInProgress, StepPlan
    from vmserve.scheduler.sequence import Request, Sequence
    from vmserve.speculation.base import Drafter
    from vmserve.telemetry.counters import EngineCounters
    from vmserve.telemetry.phases import PhaseSpan

__all__ = ["Drafts", "NoDrafts", "drafts_of"]


class NoDrafts:
    """Steps without drafts."""

    def wanted(self, sequences: Iterable[Sequence]) -> bool:
        return False

    def add(self, step: StepInProgress, columns: Columns) -> None:
        pass

    def keep(self, plan: StepPlan) -> None:
        pass

    def learn(self, spans: Iterable[PhaseSpan], attention: Iterable[AttentionTime]) -> None:
        pass

    def start_over(self) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass


class Drafts:
    """Adds drafts to steps, and reports to the drafter what became of them.

    Drafts take only rows and pages that nothing else in the step needs: they never preempt, and
    never keep a prompt waiting. ``max_tokens``: rows of a step; ``max_rows``: rows of logits.
    """

    def __init__(
        self,
        drafter: Drafter,
        memory: MemoryManager,
        scheduler: Scheduler,
        counters: EngineCounters,
        *,
        vocab_size: int,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self._drafter = drafter
        self._memory = memory
        self._scheduler = scheduler
        self._counters = counters
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        #: Sequences of the last question to the drafter, their numbers of tokens, and its
        #: proposals.
        self._asked: tuple[list[Sequence], list[int]] = [], []
        self._proposed: Many[list[int]] | None = None

    def wanted(self, sequences: Iterable[Sequence]) -> bool:
        """Whether these sequences may get drafts when their next tokens are known."""
        num_decoding = sum(_most(sequence) > 1 for sequence in sequences)
        return num_decoding > 0 and self._drafter.wanted(num_decoding)

    def add(self, step: StepInProgress, columns: Columns) -> Drafted | None:
        """Drafts of a step, as far as there are rows for them."""
        places: Iterable[int] = range(len(step))
        decoding = step.sequences
        num_tokens = len(step)
        if not columns.only_decodes:
            num_tokens = sum(step.num_new)
            decodes = columns.num_computed + 1 == columns.num_known
            decodes &= columns.num_computed >= columns.num_prompt
            places = np.flatnonzero(decodes).tolist()
            decoding = [step.sequences[i] for i in places]
        room = min(self._max_tokens - num_tokens, self._max_rows - len(step))
        if not decoding or room <= 0:
            return None
        proposed = self._propose(decoding, num_tokens - len(decoding))
        if proposed is None:
            return None
        drafts: list[list[int]] = [[] for _ in step.sequences]
        for place, sequence, draft in zip(places, decoding, proposed, strict=True):
            drafts[place] = self._usable(sequence, draft[: min(_most(sequence), room)])
            room -= len(drafts[place])
        if not any(drafts):
            return None
        return Drafted(drafts, columns.with_drafts(np.array([len(draft) for draft in drafts])))

    def _propose(self, decoding: list[Sequence], num_prompt_rows: int) -> Many[list[int]] | None:
        """Ask the drafter, and only once where a step is planned again with newcomers."""
        asked = list(decoding), [len(sequence.tokens) for sequence in decoding]
        if asked != self._asked:
            self._proposed = self._drafter.propose(decoding, num_prompt_rows)
            self._asked = asked
        return self._proposed

    def _usable(self, sequence: Sequence, draft: list[int]) -> list[int]:
        """The draft up to what would end the answer, or what its grammar forbids."""
        ends = sequence.request.stop_ids
        for place, token_id in enumerate(draft):
            if token_id in ends or not 0 <= token_id < self._vocab_size:
                draft = draft[:place]
                break
        if sequence.guide is not None and draft:
            draft = draft[: sequence.guide.num_allowed(draft)]
        return draft

    def keep(self, plan: StepPlan) -> None:
        """Keep what was accepted, when the tokens are appended and before sequences end."""
        if not plan.drafts:
            return
        seqs, lengths = [], []
        known = plan.columns.num_known.tolist()
        for place, draft in enumerate(plan.drafts):
            if not draft:
                continue
            sequence = plan.sequences[place]
            num_accepted = len(sequence.tokens) - known[place] - 1
            if num_accepted > 0:
                self._scheduler.accepted(sequence, num_accepted)
                seqs.append(int(plan.memory_ids[place]))
                lengths.append(known[place] + num_accepted)
            metrics = sequence.request.metrics
            metrics.num_drafted_tokens += len(draft)
            metrics.num_accepted_tokens += num_accepted
            self._counters.drafted(len(draft), num_accepted)
            self._drafter.accepted(sequence, len(draft), num_accepted)
        if seqs:
            if self._memory.options.prefix_caching:  # what is sealed is published by its tokens
                self._memory.append_tokens(*plan.take_unpublished())
            self._memory.keep(seqs, lengths)

    def learn(self, spans: Iterable[PhaseSpan], attention: Iterable[AttentionTime]) -> None:
        """Take how long a step took that was planned here: its phases, and attention in them."""
        seconds = sum(span.ended - span.began for span in spans)
        self._drafter.learn(seconds, sum(part.seconds for part in attention))

    def start_over(self) -> None:
        """Drop what is kept of all sequences, also after a call that ended halfway."""
        self._asked, self._proposed = ([], []), None
        self._drafter.start_over()

    def forget(self, request: Request) -> None:
        self._asked, self._proposed = ([], []), None
        for sequence in request.sequences:
            self._drafter.forget(sequence)


def drafts_of(parts: EngineParts, counters: EngineCounters) -> Drafts | NoDrafts:
    """The drafts of an engine with these parts."""
    if parts.drafter is None:
        return NoDrafts()
    vocab_size = parts.model_config.vocab_size
    return Drafts(
        parts.drafter,
        parts.memory,
        parts.scheduler,
        counters,
        vocab_size=vocab_size,
        max_tokens=parts.resolved.max_num_batched_tokens,
        max_rows=most_scored(vocab_size),
    )


def _most(sequence: Sequence) -> int:
    """How many tokens of a draft can become tokens of the answer besides the one drawn anyway."""
    request: Request = sequence.request
    return 0 if request.beams is not None else max(0, request.max_tokens - sequence.num_output - 1)
