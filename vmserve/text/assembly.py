"""One request at its caller: token ids come in, outputs with text go out.

The engine decides when and why a choice ends, also at a stop string, beyond which it computes
nothing. Text is made and cut here, for all clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from vmserve.sampling.params import GenerationParams
from vmserve.sampling.tokens import SampledToken
from vmserve.text.scores import PromptScores
from vmserve.text.stop import StopStrings
from vmserve.text.stream import ChoiceStream, Delta
from vmserve.text.tokenizer import Tokenizer
from vmserve.text.update import ChoiceUpdate, RequestUpdate
from vmserve.types import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
)

__all__ = ["RequestAssembly"]


#: Most tokens and log-probabilities that are taken in one go: a few milliseconds.
_MOST_ENTRIES = 2000


class ChoiceText:
    """One choice: its text, and how it ended."""

    __slots__ = ("cumulative", "finish_reason", "index", "num_tokens", "stop_reason", "stream")

    def __init__(self, index: int, stream: ChoiceStream) -> None:
        self.index = index
        self.stream = stream
        self.cumulative = 0.0
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def output(self, part: Delta) -> CompletionOutput:
        return CompletionOutput(
            self.index,
            part.text,
            part.token_ids,
            self.cumulative,
            part.logprobs,
            self.finish_reason,
            self.stop_reason,
        )


class RequestAssembly:
    """Makes outputs of a request's updates."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: GenerationParams,
        *,
        arrival_time: float,
        stream: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        #: Parameters of the request; ``_params``: those of each choice.
        self.params = params
        self._params = params.as_sampling()
        self._stops = StopStrings(self._params.stop)
        self._num_wanted = params.n
        listed = len(self._params.logprob_token_ids or ())
        #: Entries of a token: itself and the log-probabilities that come with it.
        self._entries_each = 1 + max(self._params.logprobs or 0, listed)
        self._stream = stream
        self._answers: dict[int, ChoiceText] = {}
        #: Choices with unreported results.
        self._touched: dict[int, ChoiceText] = {}
        self._prompt_logprobs: PromptScores | None = None
        self._embedding: NDArray[np.float32] | None = None
        self.metrics = RequestMetrics(arrival_time=arrival_time)
        self.finished = False

    def accepted(self) -> RequestOutput:
        """Make a delta without choices, which says that the request is queued."""
        return self._build([], delta=True)

    def take(self, updates: Sequence[RequestUpdate], now: float) -> Iterator[None]:
        """Take new updates, and pause once in a while: much may have come at once.

        ``now``: when the last of them came, in monotonic seconds.
        """
        num_entries = 0
        for update in updates:
            if update.metrics is not None:
                # A copy: the engine keeps counting in its own until the request ends.
                self.metrics = update.metrics if update.finished else copy(update.metrics)
            elif update.outputs:
                self.metrics.last_token_time = now
            if update.prompt_logprobs is not None:
                text = self._tokenizer.token_text if self._params.detokenize else None
                self._prompt_logprobs = PromptScores.unpack(update.prompt_logprobs, text)
            if update.embedding is not None:
                self._embedding = np.frombuffer(update.embedding, dtype=np.float32)
            for choice in update.outputs:
                self._touched[choice.index] = self._take(choice)
                num_entries += len(choice.token_ids) * self._entries_each
                if num_entries > _MOST_ENTRIES:
                    yield
                    num_entries = 0
            self.finished = update.finished
        if self.finished:
            self.metrics.finished_time = self.metrics.finished_time or now

    def tell(self) -> RequestOutput | None:
        """Make the output of what was taken; None if there is nothing to say yet."""
        touched, self._touched = self._touched, {}
        if not self._stream:
            return self._build(self._best(), delta=False) if self.finished else None
        outputs = []
        for answer in touched.values():
            delta = answer.stream.take_delta()
            if delta.token_ids or answer.finish_reason is not None:
                outputs.append(answer.output(delta))
        return self._build(outputs, delta=True) if outputs or self.finished else None

    def _take(self, choice: ChoiceUpdate) -> ChoiceText:
        answer = self._answers.get(choice.index)
        if answer is None:
            stream = ChoiceStream(self._tokenizer, self._params, self._stops)
            answer = self._answers[choice.index] = ChoiceText(choice.index, stream)
        self._push(answer, choice)
        answer.cumulative = choice.cumulative_logprob
        if choice.finish_reason is not None:
            answer.stream.finish()
            answer.finish_reason, answer.stop_reason = choice.finish_reason, choice.stop_reason
        return answer

    def _push(self, answer: ChoiceText, choice: ChoiceUpdate) -> None:
        """Add the tokens to the text."""
        hidden = len(choice.token_ids) - 1 if choice.hides_last else -1
        least = self._params.min_tokens
        for place, token_id in enumerate(choice.token_ids):
            answer.num_tokens += 1
            top = None if choice.logprobs is None else choice.logprobs[place]
            answer.stream.push(
                SampledToken(token_id, 0.0, top),
                may_stop=answer.num_tokens > least,
                hidden=place == hidden,
            )

    # -- outputs ----------------------------------------------------------------------

    def _best(self) -> list[CompletionOutput]:
        """All choices in order; with ``best_of``, the n of highest log-probability, best first."""
        answers = [self._answers[index] for index in sorted(self._answers)]
        outputs = [answer.output(answer.stream.whole()) for answer in answers]
        if self._num_wanted < len(outputs):
            outputs.sort(key=lambda output: -output.cumulative_logprob)
            outputs = outputs[: self._num_wanted]
            for index, output in enumerate(outputs):
                output.index = index
        return outputs

    def _build(self, outputs: list[CompletionOutput], *, delta: bool) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            metrics=self.metrics,
            prompt_logprobs=self._prompt_logprobs,
            embedding=self._embedding,
            delta=delta,
        )
