"""The three parts of a step: launch, draw, collect.

*Launch* gives the model's work to the device. *Draw* gives it the sampler's work. *Collect* waits
for the tokens and makes updates. A step may be launched before the one before it is collected
(``docs/decisions/0016-async-scheduling.md``). Then the tokens that it reads are not known yet: each
is a negative placeholder in its sequence, and is looked up on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress, pairwise
from typing import TYPE_CHECKING, TypeVar

from vmserve.sampling.tokens import SamplingRow
from vmserve.scheduler.sequence import SequenceStatus

if TYPE_CHECKING:
    import torch

    from vmserve.engine.accept import TokenAcceptor
    from vmserve.engine.answers import RequestAnswer
    from vmserve.engine.drafts import Drafts
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
    """A step that was launched and is not collected."""

    plan: StepPlan
    epoch: int
    phases: StepPhases
    logits: StepLogits
    #: Whether it was launched before the tokens of the step before it were known.
    is_ahead: bool
    #: Whether requests may have been aborted since its tokens were drawn.
    was_kept: bool = False
    #: Tokens that only the device knows; None: ``samples`` has them, one for each sampler.
    drawing: Drawing | None = None
    samples: list[SampledToken] = field(default_factory=list)

    def blocking_reason(self) -> str | None:
        """Why the next step cannot be planned before this one is collected; None if it can."""
        if self.logits.drafts:
            return "speculation"  # how many tokens are known afterwards is not known
        if self.logits.beams:
            return "beams"  # which continue, and as whose forks, is not known
        if self.logits.prompt_rows:
            return "prompt_logprobs"  # read from logits that the next step may overwrite
        if self.logits.pooled_rows:
            return "pooling"  # the next step may be the prompt's next chunk, and end first
        if self.samples:
            return "sampler"  # the host has drawn the tokens, so they are known already
        if any(seq.status is SequenceStatus.FOLLOWING for seq in self.logits.samplers):
            return "forks"  # some may end with their first token, and never start
        return None

    @contextmanager
    def with_placeholder_tokens(self) -> Iterator[None]:
        """Append placeholder token ids (-1, -2, …) for tokens that are still being sampled.

        Sequences that end with this step, whatever their token, get none.
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
    """Executes plans. The engine decides when, and handles errors."""

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
        """Launch a plan. ``previous``: the step whose tokens it may read before the host does."""
        drawn = None
        if previous is not None and previous.drawing is not None:
            drawn = previous.drawing.token_ids
        logits = self._execute(plan, drawn)
        self._memory.launched(epoch)
        self._scheduler.computed(plan)
        return InFlightStep(plan, epoch, phases, logits, previous is not None)

    def draw(self, flight: InFlightStep) -> None:
        """Draw the tokens. Those of all steps before must be known."""
        if flight.is_ahead:
            # Sequences that ended meanwhile computed one token too many: draw nothing for them.
            flight.logits = flight.logits.of_running()
        logits = flight.logits
        rows = [each.sampling or _sampling_row(each) for each in logits.samplers]
        masks = self._structured.masks(logits.samplers, logits.drafts)
        if masks:
            given = zip(rows, masks, strict=True)
            rows = [row if mask is None else row.in_step(mask) for row, mask in given]
        if logits.drafts:
            rows = _behind_drafts(logits, rows)

        def sample() -> None:
            numbers = logits.sampling_logits(self._runtime)
            flight.drawing = self._sampler.start(numbers, rows)
            if flight.drawing is None:
                flight.samples = self._sampler.sample(numbers, rows)

        self._with_room(sample)
        if flight.drawing is not None and not logits.beams and not logits.prompt_rows:
            flight.logits = logits.without_logits()  # the next step's may take their memory

    def collect(self, flight: InFlightStep, drafts: Drafts | None = None) -> list[RequestUpdate]:
        """Wait for the tokens, take them in, update the scheduler; returns updates for callers.

        ``drafts``: those of the step, if it has any.
        """
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
        answers: list[RequestAnswer] = []
        for accepted in self._acceptor.accept(logits, samples, self._sampler, masks):
            if drafts is not None:
                drafts.keep(flight.plan)
                drafts = None
            for sequence in accepted.finished:
                self._scheduler.finish(sequence)
            for parent, child in accepted.forks:
                self._scheduler.fork(parent, child)
            answers += accepted.answers
        return self._acceptor.updates(answers)

    def publish_tokens(self, plan: StepPlan) -> None:
        """Give the prefix cache the tokens that became known, which identify blocks."""
        owners, tokens = plan.take_unpublished()
        if len(owners):
            self._memory.append_tokens(owners, tokens)

    def _execute(self, plan: StepPlan, drawn: torch.Tensor | None) -> StepLogits:
        # -1 for a paged sequence: kernels find it by its row of the block tables.
        slots = self._memory.slots(plan.memory_ids)
        return self._with_room(lambda: self._runner.execute(plan, slots, drawn))

    def _with_room(self, work: Callable[[], _Result]) -> _Result:
        """Run ``work``; while the device is out of memory, give pages of the pool back and retry.

        At first what torch lacks of its share, then twice as much each time. Cached prefixes stay
        unless they are in the way.
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


def _behind_drafts(logits: StepLogits, rows: list[SamplingRow]) -> list[SamplingRow]:
    """The rows of ``logits.samplers``, each with the drafted tokens before it."""
    changed = list(rows)
    for at, (before, sequence) in enumerate(pairwise(logits.samplers), start=1):
        if sequence is before:
            num_before = len(changed[at - 1].drafted)
            drafted = tuple(logits.drafts[sequence][: num_before + 1])
            changed[at] = rows[at].in_step(rows[at].mask, drafted)
    return changed


def _sampling_row(sequence: Sequence) -> SamplingRow:
    """What the sampler reads of a sequence, made once."""
    request = sequence.request
    sequence.sampling = SamplingRow(
        params=request.params,
        seed=request.seed,
        index=sequence.index,
        tokens=sequence.tokens,
        num_prompt=sequence.num_prompt,
        stop_ids=request.stop_ids,
        shared=request.kept,
    )
    return sequence.sampling
