"""What is counted and learned of steps: metrics, the trace, and the prices of what comes next."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vmserve.telemetry.trace import NoTrace, StepTrace

if TYPE_CHECKING:
    from vmserve.engine.build import EngineParts
    from vmserve.engine.drafts import Drafts, NoDrafts
    from vmserve.engine.flight import InFlightStep
    from vmserve.scheduler.base import StepPlan
    from vmserve.scheduler.sequence import Request
    from vmserve.telemetry.counters import EngineCounters
    from vmserve.text.update import RequestUpdate

__all__ = ["StepFigures"]

#: Tokens of a step from which on its time says how fast prompts are read.
_MANY_TOKENS = 64


class StepFigures:
    """Hears of each step when it is scheduled, launched and over."""

    def __init__(
        self, parts: EngineParts, counters: EngineCounters, drafts: Drafts | NoDrafts
    ) -> None:
        self._memory = parts.memory
        self._scheduler = parts.scheduler
        self._regimes = parts.regimes
        self._preemption = parts.preemption
        self._runtime = parts.runtime
        #: Elsewhere than on a CPU, attention is not timed.
        self._times_attention = parts.runtime.device_type == "cpu"
        self._clock = parts.clock
        self._looks_up = parts.resolved.prefix_caching
        self._counters = counters
        self._drafts = drafts
        trace_file = parts.resolved.trace_file
        self.trace = NoTrace() if trace_file is None else StepTrace(Path(trace_file))
        self._last_ended = 0.0

    def waited(self, reason: str) -> None:
        """A step was launched when no other ran, for ``reason``."""
        self._counters.synchronous(reason)

    def scheduled(self, plan: StepPlan) -> None:
        """Note the requests of which a step reads prompts."""
        if plan.only_decodes:
            return
        now = self._clock()
        for index in np.flatnonzero(plan.reads_prompt).tolist():
            request = plan.sequences[index].request
            request.metrics.num_prefill_chunks += 1
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = now
                self._count_lookup(request)

    def _count_lookup(self, request: Request) -> None:
        if self._looks_up and not request.params.reads_whole_prompt:
            self._counters.prefix_cache_queries += len(request.prompt_token_ids)
            self._counters.prefix_cache_hits += request.metrics.num_cached_tokens

    def launched(self, flight: InFlightStep) -> None:
        """End the model's phase. Learn the speed of prompts where a step is mostly of them, and
        how attention's time differs from the predicted one."""
        is_of_prompts = not flight.is_ahead and _reads_prompts_mostly(flight.plan)
        if is_of_prompts:
            self._runtime.synchronize()  # else only its launches would be timed
        seconds = flight.phases.end("model")
        if is_of_prompts:
            self._preemption.prefilled(flight.plan.num_tokens, seconds)
        for regime, batch, measured in flight.logits.attention:
            predicted = self._regimes.attended(regime, batch, measured)
            self._counters.attended(regime.value, measured, predicted)
        self._counters.steps_overlapped += flight.is_ahead

    def ended(self, flight: InFlightStep, outputs: list[RequestUpdate]) -> None:
        """Count a step that was collected, and the requests that have ended with it."""
        phases = flight.phases
        self._counters.step(flight.plan.num_tokens, phases)
        # Steps overlap: each is counted from the end of the one before it.
        began, ended = phases.spans[0].began, phases.spans[-1].ended
        self._regimes.stepped(ended - max(began, self._last_ended))
        self._last_ended = ended
        if not flight.is_ahead and self._times_attention:
            self._drafts.learn(phases.spans, flight.logits.attention)
        self.trace.step(
            flight.plan, phases, self._scheduler, self._memory, outputs, ahead=flight.is_ahead
        )


def _reads_prompts_mostly(plan: StepPlan) -> bool:
    if plan.num_tokens < _MANY_TOKENS:
        return False
    num_tokens = plan.num_tokens - sum(map(len, plan.drafts))
    return num_tokens >= max(_MANY_TOKENS, 8 * len(plan))
