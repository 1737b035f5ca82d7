"""What one step does, from its plan to what became known by it, in three parts.

*Launch*: the model's work goes to the device. *Draw*: the sampler's work follows it. *Take in*:
the tokens are waited for, and told. A step may be launched before the one before it is taken in
(``docs/decisions/0016-async-scheduling.md``); then the tokens that it reads are not known yet:
each stands in its sequence as a number below zero, and is looked up on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TYPE_CHECKING, TypeVar

from vmserve.sampling.tokens import SamplingRow
from vmserve.scheduler.sequence import SequenceStatus

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from vmserve.engine.accept import TokenAcceptor
    from vmserve.engine.answers import Answer
    from vmserve.engine.grammars import StructuredRequests
    from vmserve.memory.manager import MemoryManager
    from vmserve.runner.model_runner import Runner, StepLogits
    from vmserve.runner.runtime import DeviceRuntime
    from vmserve.sampling import Drawing, SampledToken, TokenSampler
    from vmserve.scheduler.base import Scheduler, StepPlan
    from vmserve.scheduler.sequence import Sequence
    from vmserve.telemetry.phases import StepPhases
    from vmserve.text.update import RequestUpdate

__all__ = ["EngineStep", "InFlightStep"]

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(eq=False, slots=True)
class InFlightStep:
    """A step that was launched and is not taken in."""

    plan: StepPlan
    epoch: int
    phases: StepPhases
    logits: StepLogits
    #: Launched before the tokens of the step before it were known.
    is_ahead: bool
    #: Others may have been aborted since its tokens were drawn.
    was_kept: bool = False
    #: The tokens, while only the device knows them; else ``samples``, of each sampler.
    drawing: Drawing | None = None
    samples: list[SampledToken] = field(default_factory=list)

    def blocking_reason(self) -> str | None:
        """Why the next step cannot be planned before this one is taken in; None if it can."""
        if self.logits.beams:
            return "beams"  # who goes on, and as whose fork
        if self.logits.prompt_rows:
            return "prompt_logprobs"  # read from logits that the next step may write over
        if self.logits.pooled_rows:
            return "pooling"  # the next step may be the prompt's next chunk, and be over first
        if self.samples:
            return "sampler"  # the host has drawn them, so they are known already
        if any(seq.status is SequenceStatus.FOLLOWING for seq in self.logits.samplers):
            return "forks"  # some may end with their first token, and never start
        return None

    @contextmanager
    def with_placeholder_tokens(self) -> Iterator[None]:
        """Append placeholder token ids (-1, -2, …) for tokens that are still being sampled.

        Sequences that end with this step whatever their token is get none.
        """
        expecting = []
        for row, sequence in enumerate(self.logits.samplers):
            is_last = sequence.num_output + 1 >= sequence.request.max_tokens
            if not is_last and sequence.status is not SequenceStatus.FINISHED:
                sequence.tokens.append(-1 - row)
                expecting.append(sequence)
        try:
            yield
        finally:
            for sequence in expecting:
                sequence.tokens.pop()


class EngineStep:
    """Carries out what was planned. The engine says when, and what comes of an error."""

    def __init__(
        self,
        memory: MemoryManager,
        scheduler: Scheduler,
        runner: Runner,
        runtime: DeviceRuntime,
        sampler: TokenSampler,
        structured: StructuredRequests,
        acceptor: TokenAcceptor,
    ) -> None:
        self._memory = memory
        self._scheduler = scheduler
        self._runner = runner
        self._runtime = runtime
        self._sampler = sampler
        self._structured = structured
        self._acceptor = acceptor

    def launch(
        self, plan: StepPlan, epoch: int, phases: StepPhases, previous: InFlightStep | None
    ) -> InFlightStep:
        """``previous``: the step whose tokens this one may read before the host does."""
        drawn = None
        if previous is not None and previous.drawing is not None:
            drawn = previous.drawing.token_ids
        logits = self._execute(plan, drawn)
        self._memory.launched(epoch)
        self._scheduler.computed(plan)
        return InFlightStep(plan, epoch, phases, logits, previous is not None)

    def draw(self, flight: InFlightStep) -> None:
        """The tokens of all steps before are known."""
        if flight.is_ahead:
            # Who has ended by them computed one token too many: nothing is drawn for it.
            flight.logits = flight.logits.of_running()
        logits = flight.logits
        masks = self._structured.masks(logits.samplers)
        rows = list(map(_sampling_row, logits.samplers, masks))
        numbers = self._with_room(lambda: logits.sampling_logits(self._runtime))
        flight.drawing = self._with_room(lambda: self._sampler.start(numbers, rows))
        if flight.drawing is None:
            flight.samples = self._with_room(lambda: self._sampler.sample(numbers, rows))
        elif not logits.beams and not logits.prompt_rows:
            flight.logits = logits.without_logits()  # the next step's may take their memory

    def collect(self, flight: InFlightStep) -> list[RequestUpdate]:
        """Wait for the tokens; what there is to tell."""
        samples = flight.samples
        if flight.drawing is not None:
            samples = flight.drawing.take()
            flight.phases.end("sample")
        logits = flight.logits
        if flight.was_kept:
            running = [seq.status is not SequenceStatus.FINISHED for seq in logits.samplers]
            samples = list(compress(samples, running))
            logits = logits.of_running()
        masks = self._structured.masks(logits.beams) if logits.beams else ()
        answers: list[Answer] = []
        for accepted in self._acceptor.accept(logits, samples, self._sampler, masks):
            for sequence in accepted.changes.finished:
                self._scheduler.finish(sequence)
            for parent, child in accepted.changes.forks:
                self._scheduler.fork(parent, child)
            answers += accepted.answers
        return self._acceptor.updates(answers)

    def publish_tokens(self, plan: StepPlan) -> None:
        """What became known names blocks for the prefix cache, once they are computed."""
        owners, tokens = plan.take_unpublished()
        if len(owners):
            self._memory.append_tokens(owners, tokens)

    def give_up(self, epoch: int) -> None:
        """What was written is worthless; no page of it is used again before that has ended."""
        try:
            self._runtime.synchronize()
        except RuntimeError as error:
            logger.error("the device failed", exc_info=error)
        self._memory.abandon(epoch)

    def _execute(self, plan: StepPlan, drawn: torch.Tensor | None) -> StepLogits:
        # -1 for a paged sequence: its row of the block tables is where kernels find it.
        slots = self._memory.slots(plan.memory_ids)
        return self._with_room(lambda: self._runner.execute(plan, slots, drawn))

    def _with_room(self, work: Callable[[], _Result]) -> _Result:
        """Run ``work``; while the device is out of memory, give pages of the pool back and retry.

        At first what torch lacks of its share, then twice as much each time: cached prefixes that
        are not in the way stay.
        """
        wanted = 1
        while True:
            try:
                return work()
            except self._runtime.memory_errors as error:
                self._runtime.synchronize()
                wanted = max(wanted, self._memory.device.missing_bytes())
                given = self._memory.give_back(wanted)
                if not given:
                    raise
                logger.warning("the KV cache gave %d pages to activations: %s", given, error)
            wanted = 2 * max(wanted, given * self._memory.layout.total_page_bytes)


def _sampling_row(sequence: Sequence, mask: NDArray[np.bool_] | None) -> SamplingRow:
    """What the sampler reads of a sequence. ``mask``: the tokens that its grammar allows."""
    row = sequence.sampling
    if row is None:
        request = sequence.request
        row = sequence.sampling = SamplingRow(
            params=request.params,
            seed=request.seed,
            index=sequence.index,
            tokens=sequence.tokens,
            num_prompt=sequence.num_prompt,
            stop_ids=request.stop_ids,
            bad_words=request.bad_words,
        )
    return row if mask is None else replace(row, mask=mask)
