"""The steps of an engine: launch, draw, collect.

*Launch* plans a step and gives the model's work to the device. *Draw* gives it the sampler's work.
*Collect* waits for the tokens and makes updates. A step may be launched before the one before it is
collected (``docs/decisions/0016-async-scheduling.md``). Then the tokens that it reads are not known
yet: each is a negative placeholder in its sequence, and is looked up on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import compress, pairwise
from typing import TYPE_CHECKING, TypeVar

from vmserve.engine.flight import InFlightStep
from vmserve.engine.results import RequestFailure
from vmserve.errors import DriverError, OutOfMemoryError, VmserveError
from vmserve.sampling.tokens import SamplingRow
from vmserve.scheduler.base import NoRoomError
from vmserve.scheduler.sequence import SequenceStatus
from vmserve.telemetry.phases import StepPhases

if TYPE_CHECKING:
    import torch

    from vmserve.engine.accept import TokenAcceptor
    from vmserve.engine.answers import RequestAnswer
    from vmserve.engine.build import EngineParts
    from vmserve.engine.drafts import Drafts, NoDrafts
    from vmserve.engine.figures import StepFigures
    from vmserve.engine.grammars import StructuredRequests
    from vmserve.engine.pool import Pool
    from vmserve.runner.model_runner import StepLogits
    from vmserve.scheduler.base import StepPlan
    from vmserve.scheduler.sequence import Sequence
    from vmserve.text.update import RequestUpdate

__all__ = ["Steps"]

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class Steps:
    """Plans steps and executes them, one after the other or overlapping.

    The engine decides when, and ends requests. An exception leaves :attr:`concerned` and
    :attr:`previous` as they are, for the engine to end no more requests than it must.
    """

    def __init__(
        self,
        parts: EngineParts,
        pool: Pool,
        drafts: Drafts | NoDrafts,
        structured: StructuredRequests,
        acceptor: TokenAcceptor,
        figures: StepFigures,
    ) -> None:
        self._memory = parts.memory
        self._scheduler = parts.scheduler
        self._runner = parts.runner
        self._runtime = parts.runtime
        self._sampler = parts.sampler
        self._ranks = parts.ranks
        self._clock = parts.clock
        self._is_async = parts.resolved.async_scheduling
        self._publishes = parts.resolved.prefix_caching
        self._pool = pool
        self._drafts = drafts
        self._structured = structured
        self._acceptor = acceptor
        self._figures = figures
        #: The running step, whose tokens are not known yet; only with async_scheduling.
        self.in_flight: InFlightStep | None = None
        #: Plan of the step that is being made, whose tokens are being computed or taken in.
        self.concerned: StepPlan | None = None
        #: Step before it, if that one is still running when it is launched.
        self.previous: InFlightStep | None = None
        #: Why the next step was not launched before the last one's tokens were known.
        self._wait_reason = "idle"
        #: Whether the mapper was waited for since memory was refused to a request that is alone.
        self._has_settled = False

    def forget(self) -> None:
        """A step is over, well or not: nothing is being made any more."""
        self.concerned = self.previous = None

    def start_over(self) -> None:
        """Let the device end its work, and drop what it computed."""
        self.in_flight = None
        self._runtime.synchronize()

    def take_running(self) -> InFlightStep | None:
        """The step that runs, to be collected now."""
        running, self.in_flight = self.in_flight, None
        if running is not None:
            running.was_kept = True
        return running

    # -- launch -------------------------------------------------------------------------

    def launch(self) -> InFlightStep | RequestFailure | None:
        """Plan a step and launch it. A failure: that request is in the way of all. None: not now.

        Where nothing can be planned, the memory rests.
        """
        phases = StepPhases(self._clock)
        try:
            plan = self._scheduler.schedule(
                add_drafts=self._drafts.add, may_come=self._pool.lease.may_come
            )
        except NoRoomError as error:
            return RequestFailure(error.request_id, error)
        if plan is None:
            if not self._scheduler.awaits_memory:
                self._pool.idle()
                self._structured.wait()
            return None
        phases.end("schedule")
        try:
            epoch = self._apply(plan)
        except (OutOfMemoryError, DriverError) as error:
            return self._make_room_after(error, plan)
        flight = self._compute(plan, epoch, phases)
        if self._is_async:
            self._figures.waited(self._wait_reason)
            self._wait_reason = "idle"
        return flight

    def launch_ahead(self, running: InFlightStep) -> InFlightStep | None:
        """Launch the step after ``running`` before its tokens are known; None if that is
        impossible. Nothing is preempted or waited for."""
        self.previous = running
        self._wait_reason = running.blocking_reason() or "room"
        if self._drafts.wanted(running.logits.samplers):
            self._wait_reason = "speculation"  # drafts continue tokens that are known
        flight = None
        # Orders of a pool are carried out when no step is in flight.
        if self._wait_reason == "room" and not self._pool.lease.has_orders:
            with running.with_placeholder_tokens(), self._memory.without_waiting():
                flight = self._launch_after(running)
        self.previous = None
        running.phases.resume()
        return flight

    def _launch_after(self, running: InFlightStep) -> InFlightStep | None:
        phases = StepPhases(self._clock)
        plan = self._scheduler.schedule(ahead=True)
        if plan is None:
            return None
        phases.end("schedule")
        try:
            epoch = self._apply(plan)
        except (OutOfMemoryError, DriverError):
            return None
        return self._compute(plan, epoch, phases, running)

    def _apply(self, plan: StepPlan) -> int:
        """Have the plan's memory; returns its epoch."""
        try:
            return self._memory.apply(plan.memory)
        except DriverError as error:
            if error.sticky:
                self._ranks.memory_failed(error)
            raise

    def _compute(
        self,
        plan: StepPlan,
        epoch: int,
        phases: StepPhases,
        running: InFlightStep | None = None,
    ) -> InFlightStep:
        """Launch a plan whose memory is there. ``running``: the step whose tokens it may read
        before the host does."""
        self._has_settled = False
        self._scheduler.applied(plan)
        self._figures.scheduled(plan)
        phases.end("memory")
        self.concerned = plan
        drawn = None
        if running is not None and running.drawing is not None:
            drawn = running.drawing.token_ids
        logits = self._execute(plan, drawn)
        self._memory.launched(epoch)
        self._scheduler.computed(plan)
        flight = InFlightStep(plan, phases, logits, is_ahead=running is not None)
        self._figures.launched(flight)
        self.concerned = None
        return flight

    def _make_room_after(self, error: VmserveError, plan: StepPlan) -> RequestFailure | None:
        """The system refused memory that the plan counted on: preempt; alone, try once more; then
        fail the only request."""
        if self._scheduler.make_room():
            logger.warning("made room: %s", error)
            return None
        if not self._has_settled:  # the mapper may hold pages that the plan counts on
            self._has_settled = True
            self._memory.settle()
            return None
        return RequestFailure(plan.sequences[0].request.request_id, error)

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

    # -- draw ---------------------------------------------------------------------------

    def draw(self, flight: InFlightStep) -> None:
        """Draw the tokens. Those of all steps before must be known."""
        self.concerned = flight.plan
        if flight.is_ahead:
            flight.phases.resume()
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
        self.concerned = None
        flight.phases.end("sample")

    def leave_running(self, flight: InFlightStep) -> bool:
        """Collect a drawn step later, if the next one may be launched before its tokens are
        known; returns whether that is so."""
        if not self._is_async:
            return False
        if not flight.is_ahead and (reason := flight.blocking_reason()) is not None:
            self._wait_reason = reason
            return False
        self.in_flight = flight
        return True

    # -- collect ------------------------------------------------------------------------

    def collect(self, flight: InFlightStep) -> list[RequestUpdate]:
        """Wait for the tokens, take them in, update the scheduler; returns updates for callers.

        :meth:`collected` follows, when the engine knows which requests have ended.
        """
        self.concerned = flight.plan
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
        for index, accepted in enumerate(
            self._acceptor.accept(logits, samples, self._sampler, masks)
        ):
            if index == 0:  # the tokens are appended, and no sequence has ended
                self._drafts.keep(flight.plan)
            for sequence in accepted.finished:
                self._scheduler.finish(sequence)
            for parent, child in accepted.forks:
                self._scheduler.fork(parent, child)
            answers += accepted.answers
        updates = self._acceptor.updates(answers)
        if self._publishes:
            self.publish_tokens(flight.plan)
        return updates

    def publish_tokens(self, plan: StepPlan) -> None:
        """Give the prefix cache the tokens that became known, which identify blocks."""
        owners, tokens = plan.take_unpublished()
        if len(owners):
            self._memory.append_tokens(owners, tokens)

    def collected(self, flight: InFlightStep, outputs: list[RequestUpdate]) -> None:
        """The step is over."""
        flight.phases.end("output")
        self._figures.ended(flight, outputs)
        self.concerned = None


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
