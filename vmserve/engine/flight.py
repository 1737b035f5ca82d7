"""A step between its launch and the taking in of its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vmserve.scheduler.sequence import SequenceStatus

if TYPE_CHECKING:
    from vmserve.runner.model_runner import StepLogits
    from vmserve.sampling import Drawing, SampledToken
    from vmserve.scheduler.base import StepPlan
    from vmserve.telemetry.phases import StepPhases

__all__ = ["InFlightStep"]


@dataclass(eq=False, slots=True)
class InFlightStep:
    """A step that was launched and is not collected."""

    plan: StepPlan
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
