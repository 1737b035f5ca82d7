"""Answers that are not complete: their new tokens, their ends, and the updates made of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vmserve.sampling.tokens import SampledToken, TopTokens
from vmserve.scheduler.sequence import Request
from vmserve.text.scores import PromptScores
from vmserve.text.stop import StopWatcher
from vmserve.text.update import ChoiceUpdate, RequestUpdate
from vmserve.types import FinishReason

__all__ = ["Choice", "RequestAnswer"]


@dataclass(eq=False, slots=True)
class Choice:
    """One choice of an answer. ``token_ids`` and ``tops``: since its last update."""

    index: int
    #: Log-probabilities of the tokens; None if they are not asked for.
    tops: list[TopTokens] | None
    #: Watcher for stop strings; None if there are none.
    watcher: StopWatcher | None = None
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    hides_last: bool = False

    def add(self, token: SampledToken) -> None:
        self.token_ids.append(token.token_id)
        self.cumulative_logprob += token.logprob
        if self.tops is not None and token.top is not None:
            self.tops.append(token.top)

    def take_update(self) -> ChoiceUpdate:
        """What is new since the last call."""
        token_ids, tops = self.token_ids, self.tops
        self.token_ids = []
        self.tops = None if tops is None else []
        return ChoiceUpdate(
            self.index,
            token_ids,
            self.cumulative_logprob,
            tops,
            self.finish_reason,
            self.stop_reason,
            self.hides_last,
        )


@dataclass(eq=False, slots=True)
class RequestAnswer:
    """The output of a request that is not complete. A beam search has choices at its end only."""

    request: Request
    choices: list[Choice]
    #: Log-probabilities of the prompt; None if they are not asked for.
    prompt_scores: PromptScores | None
    #: Choices that have not ended; 0 for a beam search.
    num_running: int
    #: Choices with something new since the last update.
    changed: list[Choice] = field(default_factory=list)
    #: Whether an update with tokens was made; it has the prompt's scores.
    has_begun: bool = False
    #: Sum of hidden states so far, for a request for an embedding.
    pooled: NDArray[np.float64] | None = None

    def mark(self, choice: Choice) -> None:
        """Put the choice in the next update."""
        if choice not in self.changed:
            self.changed.append(choice)

    def end(self, choice: Choice, reason: FinishReason, stop: int | str | None = None) -> None:
        self.num_running -= 1
        choice.finish_reason = reason
        choice.stop_reason = stop
        self.mark(choice)

    def final_update(self) -> RequestUpdate:
        """The last update: all choices, or of a stream what is new."""
        return self._update(self.changed if self.request.stream else self.choices, finished=True)

    def stream_update(self) -> RequestUpdate:
        """What is new; without choices if nothing is."""
        return self._update(self.changed, finished=False)

    def _update(self, choices: list[Choice], *, finished: bool) -> RequestUpdate:
        self.changed = []
        has_tokens = bool(choices) or finished
        scores = self.prompt_scores if has_tokens and not self.has_begun else None
        self.has_begun = self.has_begun or has_tokens
        return RequestUpdate(
            self.request.request_id,
            [choice.take_update() for choice in choices],
            finished,
            self.request.metrics,
            None if scores is None else scores.pack(),
            self._embedding(self.pooled) if finished and self.pooled is not None else None,
        )

    def _embedding(self, pooled: NDArray[np.float64]) -> bytes:
        """The mean of the hidden states, or the last one, in float32."""
        of_all = self.request.params.pooling == "mean"
        num_states = len(self.request.prompt_token_ids) if of_all else 1
        return (pooled / num_states).astype(np.float32).tobytes()
