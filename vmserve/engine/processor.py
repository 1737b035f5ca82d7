"""From sampled tokens to what callers are told: which tokens are new, what has ended and why."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from vmserve.runner.model_runner import StepLogits
from vmserve.sampling import SampledToken, SamplingRow, TokenSampler
from vmserve.sampling.tokens import BeamCandidates, BeamOutput, TopTokens
from vmserve.scheduler.base import Scheduler
from vmserve.scheduler.sequence import Request, Sequence
from vmserve.structured.guide import Guide
from vmserve.telemetry.counters import EngineCounters
from vmserve.text.scores import PromptScores
from vmserve.text.stop import StopWatcher
from vmserve.text.tokenizer import Tokenizer
from vmserve.text.update import ChoiceUpdate, RequestUpdate
from vmserve.types import FinishReason

__all__ = ["OutputProcessor", "sampling_row"]


@dataclass(eq=False, slots=True)
class _Choice:
    """One answer: what its caller has not been told, and its end."""

    index: int
    #: None where log-probabilities are not asked for.
    tops: list[TopTokens] | None
    #: None where there are no stop strings.
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

    def take(self) -> ChoiceUpdate:
        """What is new, which is then told."""
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
class _Open:
    """A request whose output is not complete."""

    request: Request
    choices: list[_Choice]
    prompt_logprobs: PromptScores | None
    #: Choices that have not ended.
    num_running: int
    #: Choices with news that a stream has not been told.
    news: list[_Choice] = field(default_factory=list)
    #: Whether the caller has its first tokens.
    is_told: bool = False
    #: The sum of the hidden states that an embedding is made of, so far.
    pooled: NDArray[np.float64] | None = None


def sampling_row(sequence: Sequence, mask: NDArray[np.bool_] | None = None) -> SamplingRow:
    """What the sampler needs to know of a sequence; ``mask``: what its grammar lets follow."""
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


class OutputProcessor:
    """Appends tokens to their sequences, ends those that are complete, builds outputs."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: Several[int],
        scheduler: Scheduler,
        counters: EngineCounters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._scheduler = scheduler
        self._counters = counters
        self._clock = clock
        self._open: dict[str, _Open] = {}

    def open(self, request: Request) -> None:
        """Expect tokens of this request."""
        choices = []
        if request.beams is None:  # else the answers are known when the search is over
            choices = [self._choice(request, sequence.index) for sequence in request.sequences]
        scored: PromptScores | None = None
        if request.params.prompt_logprobs is not None:
            scored = PromptScores(None)
        self._open[request.request_id] = _Open(request, choices, scored, len(choices))

    def _choice(self, request: Request, index: int) -> _Choice:
        params = request.params
        watcher = StopWatcher(self._tokenizer.table, params) if params.stop else None
        return _Choice(index, None if params.logprobs is None else [], watcher)

    def process(
        self,
        logits: StepLogits,
        samples: list[SampledToken],
        sampler: TokenSampler,
        beam_masks: Several[NDArray[np.bool_] | None] = (),
    ) -> list[RequestUpdate]:
        """Take in one step; returns an update for each request with something to tell.

        ``beam_masks``: of each beam what its grammar lets follow.
        """
        now = self._clock()
        self._score_prompts(logits, sampler)
        self._pool_prompts(logits)
        touched: dict[str, _Open] = {}
        take_token, is_open = self._take_token, self._open
        for sequence, sample in zip(logits.samplers, samples, strict=True):
            request_id = sequence.request.request_id
            entry = touched[request_id] = is_open[request_id]
            take_token(entry, sequence, sample, now)
        touched.update(self._search_on(logits, sampler, beam_masks, now))
        outputs = [self._output(entry, now) for entry in touched.values()]
        return [output for output in outputs if output is not None]

    def accepted(self, request: Request) -> RequestUpdate:
        """A delta without choices, to tell a stream that its request is queued."""
        return self._update(self._open[request.request_id], [], finished=False)

    def abort(self, request: Request) -> RequestUpdate:
        """The last output of a request that is cut off: what there is, reason "abort"."""
        entry = self._open.pop(request.request_id)
        if request.beams is not None:
            self._cut_off(entry)
        for choice in entry.choices:
            if choice.finish_reason is None:
                self._end(entry, choice, "abort", None)
        request.metrics.finished_time = self._clock()
        self._counters.requests_aborted += 1
        return self._final(entry)

    # -- one token --------------------------------------------------------------------

    def _take_token(
        self, entry: _Open, sequence: Sequence, sample: SampledToken, now: float
    ) -> None:
        choice = entry.choices[sequence.index]
        request = entry.request
        if request.max_tokens == 0:  # the prompt was to be scored, nothing else
            self._end(entry, choice, "length", None)
            self._scheduler.finish(sequence)
            return
        sequence.tokens.append(sample.token_id)
        self._counters.generation_tokens += 1
        self._counters.first_tokens += sequence.num_output == 1
        request.metrics.token_at(now)
        if sequence.guide is None:
            reason, stop = self._push(choice, sequence, sample)
        else:
            reason, stop = self._push_guided(choice, sequence, sequence.guide, sample)
        if reason is None:
            if choice not in entry.news:
                entry.news.append(choice)
            return
        self._end(entry, choice, reason, stop)
        self._scheduler.finish(sequence)

    def _push(
        self, choice: _Choice, sequence: Sequence, sample: SampledToken
    ) -> tuple[FinishReason | None, int | str | None]:
        """Add the token; says whether and why the choice ends with it."""
        choice.add(sample)
        request = sequence.request
        params, token_id = request.params, sample.token_id
        num_output = len(sequence.tokens) - sequence.num_prompt
        may_stop = num_output > params.min_tokens
        if may_stop:
            is_asked = token_id in params.stop_token_ids
            if is_asked or (token_id in self._eos_token_ids and not params.ignore_eos):
                choice.hides_last = True
                # An id that was asked for is the reason, also when it is the end token.
                return "stop", token_id if is_asked else None
        if choice.watcher is not None and (found := choice.watcher.push(token_id, may_stop)):
            return "stop", found
        return ("length" if num_output >= request.max_tokens else None), None

    @staticmethod
    def _push_guided(
        choice: _Choice, sequence: Sequence, guide: Guide, sample: SampledToken
    ) -> tuple[FinishReason | None, int | str | None]:
        """As :meth:`_push`, for an answer that a grammar ends.

        The grammar says where an end token may come, so that one always ends the answer; where
        nothing may follow no end token is needed.
        """
        choice.add(sample)
        request, token_id = sequence.request, sample.token_id
        may_stop = sequence.num_output > request.params.min_tokens
        if token_id in guide.end_ids:
            choice.hides_last = True
            return "stop", token_id if token_id in request.params.stop_token_ids else None
        guide.accept(token_id)
        if choice.watcher is not None and (found := choice.watcher.push(token_id, may_stop)):
            return "stop", found
        if guide.is_complete:
            return "stop", None
        if sequence.num_output >= request.max_tokens:
            return "length", None
        return None, None

    def _end(
        self, entry: _Open, choice: _Choice, reason: FinishReason, stop: int | str | None
    ) -> None:
        entry.num_running -= 1
        choice.finish_reason = reason
        choice.stop_reason = stop
        if choice not in entry.news:
            entry.news.append(choice)

    # -- beams ------------------------------------------------------------------------

    def _search_on(
        self,
        logits: StepLogits,
        sampler: TokenSampler,
        masks: Several[NDArray[np.bool_] | None],
        now: float,
    ) -> dict[str, _Open]:
        """Advance the beam searches that can; the requests that are complete by it."""
        entries = {seq.request.request_id: seq.request for seq in logits.beams}
        if not entries:
            return {}
        groups = [seq.request.beams for seq in logits.beams]
        most = max(group.num_candidates for group in groups if group is not None)
        ids, logprobs = sampler.beam_candidates(logits.beam_logits(), most, masks)
        for row, (sequence, group) in enumerate(zip(logits.beams, groups, strict=True)):
            assert group is not None
            group.take(sequence, BeamCandidates(ids[row], logprobs[row]))
        complete: dict[str, _Open] = {}
        for request_id, request in entries.items():
            group = request.beams
            assert group is not None
            if group.advance(self._scheduler):
                request.metrics.token_at(now)
            if group.done:
                entry = self._open[request_id]
                entry.choices = [self._answer(entry, i, o) for i, o in enumerate(group.best())]
                self._counters.generation_tokens += sum(
                    len(choice.token_ids) for choice in entry.choices
                )
                complete[request_id] = entry
        return complete

    def _answer(self, entry: _Open, index: int, output: BeamOutput) -> _Choice:
        choice = self._choice(entry.request, index)
        for token in output.tokens:
            choice.add(token)
        choice.hides_last = output.eos_token_id is not None
        self._end(entry, choice, "length" if output.eos_token_id is None else "stop", None)
        return choice

    def _cut_off(self, entry: _Open) -> None:
        """The beams as they are; their log-probabilities are not told."""
        assert entry.request.beams is not None
        for index, token_ids in enumerate(entry.request.beams.running()):
            choice = _Choice(index, None, token_ids=list(token_ids))
            entry.choices.append(choice)

    # -- prompts ----------------------------------------------------------------------

    def _score_prompts(self, logits: StepLogits, sampler: TokenSampler) -> None:
        for rows in logits.prompt_rows:
            sequence = rows.sequence
            request = sequence.request
            k = request.params.prompt_logprobs
            scored = self._open[request.request_id].prompt_logprobs
            assert k is not None
            assert scored is not None
            last = rows.first_row + len(rows.targets)
            tops = sampler.prompt_logprobs(logits.logits[rows.first_row : last], rows.targets, k)
            scored.extend(tops)
            sequence.num_prompt_scored += len(rows.targets)

    def _pool_prompts(self, logits: StepLogits) -> None:
        if not logits.pooled_rows:
            return
        assert logits.hidden is not None
        states = logits.hidden.take()
        for rows in logits.pooled_rows:
            entry = self._open[rows.sequence.request.request_id]
            chunk = states[rows.first_row : rows.first_row + rows.num_rows]
            added = chunk.sum(axis=0, dtype=np.float64)
            entry.pooled = added if entry.pooled is None else entry.pooled + added
            rows.sequence.num_prompt_scored += rows.num_rows

    # -- updates ----------------------------------------------------------------------

    def _output(self, entry: _Open, now: float) -> RequestUpdate | None:
        if entry.num_running <= 0:  # of beams none is counted
            del self._open[entry.request.request_id]
            entry.request.metrics.finished_time = now
            self._counters.requests_finished += 1
            return self._final(entry)
        if not (entry.request.stream and entry.news):
            return None
        return self._update(entry, entry.news, finished=False)

    def _final(self, entry: _Open) -> RequestUpdate:
        news = entry.news if entry.request.stream else entry.choices
        return self._update(entry, news, finished=True)

    @staticmethod
    def _update(entry: _Open, news: list[_Choice], *, finished: bool) -> RequestUpdate:
        request, entry.news = entry.request, []
        scores = None if entry.is_told else entry.prompt_logprobs
        told = bool(news) or finished
        entry.is_told = entry.is_told or told
        return RequestUpdate(
            request.request_id,
            [choice.take() for choice in news],
            finished,
            request.metrics,
            scores.pack() if scores is not None and told else None,
            _embedding(entry).tobytes() if finished and entry.pooled is not None else None,
        )


def _embedding(entry: _Open) -> NDArray[np.float32]:
    assert entry.pooled is not None
    of_all = entry.request.params.pooling == "mean"
    num_states = len(entry.request.prompt_token_ids) if of_all else 1
    embedding: NDArray[np.float32] = (entry.pooled / num_states).astype(np.float32)
    return embedding
