"""Take in what a step sampled: append tokens, decide which sequences end, advance beam searches.

Nothing here changes a queue or the KV memory: what ended and what forked is returned as values,
and :mod:`vmserve.engine.step` passes it to the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vmserve.engine.answers import Choice, RequestAnswer
from vmserve.runner.model_runner import StepLogits
from vmserve.sampling import SampledToken, TokenSampler
from vmserve.sampling.tokens import BeamCandidates, BeamOutput
from vmserve.scheduler.sequence import Request, Sequence
from vmserve.structured.guide import Guide
from vmserve.telemetry.counters import EngineCounters
from vmserve.text.scores import PromptScores
from vmserve.text.stop import StopStrings, StopWatcher
from vmserve.text.tokenizer import Tokenizer
from vmserve.text.update import RequestUpdate
from vmserve.types import FinishReason

__all__ = ["Accepted", "TokenAcceptor"]

#: Tokens that its grammar allows, or None, for each beam of a step. Empty: no beam has a grammar.
Masks: TypeAlias = "tuple[()] | list[NDArray[np.bool_] | None]"
_NOTHING: Iterator[int] = iter(())


class Accepted(NamedTuple):
    """Answers with something new, and what the scheduler has to know: ``finished`` sequences,
    then ``forks``, the parent and child of each."""

    answers: Iterable[RequestAnswer]
    finished: list[Sequence]
    forks: list[tuple[Sequence, Sequence]]


class TokenAcceptor:
    """The answers that are not complete. Called by the engine's thread only."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: Iterable[int],
        counters: EngineCounters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._counters = counters
        self._clock = clock
        self._answers: dict[str, RequestAnswer] = {}

    def open(self, request: Request) -> None:
        """Expect tokens of this request."""
        choices = []
        if request.beams is None:  # a search has its choices at the end
            stops = StopStrings(request.params.stop) if request.params.stop else None
            choices = [
                self._choice(request, sequence.index, stops) for sequence in request.sequences
            ]
        scores = None if request.params.prompt_logprobs is None else PromptScores(None)
        self._answers[request.request_id] = RequestAnswer(request, choices, scores, len(choices))

    def queued(self, request: Request) -> RequestUpdate:
        """An update without choices: informs a stream that its request is queued."""
        return self._answers[request.request_id].stream_update()

    def abort(self, request: Request) -> RequestUpdate:
        """End an answer as it is, with reason "abort"."""
        answer = self._answers.pop(request.request_id)
        if request.beams is not None:
            # Beams as they are; their log-probabilities are not reported.
            answer.choices += [
                Choice(index, None, token_ids=list(token_ids))
                for index, token_ids in enumerate(request.beams.running())
            ]
        for choice in answer.choices:
            if choice.finish_reason is None:
                answer.end(choice, "abort")
        request.metrics.finished_time = self._clock()
        self._counters.requests_aborted += 1
        return answer.final_update()

    def forget(self, request_id: str) -> None:
        """Drop an answer that is never reported."""
        if self._answers.pop(request_id, None) is not None:
            self._counters.requests_aborted += 1

    def accept(
        self,
        logits: StepLogits,
        samples: list[SampledToken],
        sampler: TokenSampler,
        masks: Masks = (),
    ) -> Iterator[Accepted]:
        """Yield what the sampled tokens changed, then what each beam search changed.

        The scheduler has to know the changes of one before the next is asked for.
        """
        now = self._clock()
        if logits.prompt_rows:
            self._score_prompts(logits, sampler)
        if logits.pooled_rows:
            self._pool_prompts(logits)
        yield self._append(logits.samplers, samples, now, logits.drafts)
        if logits.beams:
            for request in self._take_candidates(logits, sampler, masks):
                yield self._advance(request, now)

    def updates(self, answers: Iterable[RequestAnswer]) -> list[RequestUpdate]:
        """An update for each that is complete, and for each stream with something new."""
        updates = []
        for answer in answers:
            if answer.num_running <= 0:
                updates.append(self._complete(answer))
            elif answer.request.stream and answer.changed:
                updates.append(answer.stream_update())
        return updates

    def _complete(self, answer: RequestAnswer) -> RequestUpdate:
        del self._answers[answer.request.request_id]
        answer.request.metrics.finished_time = self._clock()
        self._counters.requests_finished += 1
        return answer.final_update()

    def _choice(self, request: Request, index: int, stops: StopStrings | None = None) -> Choice:
        params = request.params
        watcher = None
        if stops is not None:
            watcher = StopWatcher(self._tokenizer.table, params, stops)
        return Choice(index, None if params.logprobs is None else [], watcher)

    # -- tokens -------------------------------------------------------------------------

    def _append(
        self,
        sequences: Iterable[Sequence],
        samples: list[SampledToken],
        now: float,
        drafts: Mapping[Sequence, list[int]],
    ) -> Accepted:
        answers: dict[str, RequestAnswer] = {}
        finished: list[Sequence] = []
        append_token, open_answers = self._append_token, self._answers
        drafted = {sequence: iter(draft) for sequence, draft in drafts.items()}
        over: Sequence | None = None  # its other rows computed what is not in the answer
        for sequence, sample in zip(sequences, samples, strict=True):
            if sequence is over:
                continue
            request_id = sequence.request.request_id
            answer = answers[request_id] = open_answers[request_id]
            if append_token(answer, sequence, sample, now):
                finished.append(sequence)
                over = sequence
            elif drafted and next(drafted.get(sequence, _NOTHING), None) != sample.token_id:
                over = sequence
        return Accepted(answers.values(), finished, [])

    def _append_token(
        self, answer: RequestAnswer, sequence: Sequence, sample: SampledToken, now: float
    ) -> bool:
        """Whether the sequence ends with it."""
        choice = answer.choices[sequence.index]
        request = answer.request
        if request.max_tokens == 0:  # only the prompt was to be scored
            answer.end(choice, "length")
            return True
        sequence.tokens.append(sample.token_id)
        num_output = len(sequence.tokens) - sequence.num_prompt
        self._counters.generation_tokens += 1
        self._counters.first_tokens += num_output == 1
        request.metrics.token_at(now)
        choice.add(sample)
        if sequence.guide is None:
            reason, stop = self._stop(choice, request, num_output, sample.token_id)
        else:
            reason, stop = self._guided_stop(choice, sequence, sequence.guide, sample.token_id)
        if reason is None:
            if choice not in answer.changed:
                answer.changed.append(choice)
            return False
        answer.end(choice, reason, stop)
        return True

    def _stop(
        self, choice: Choice, request: Request, num_output: int, token_id: int
    ) -> tuple[FinishReason | None, int | str | None]:
        """Whether and why the choice ends with its new token."""
        params = request.params
        may_stop = num_output > params.min_tokens
        if may_stop:
            is_asked = token_id in params.stop_token_ids
            if is_asked or (token_id in self._eos_token_ids and not params.ignore_eos):
                choice.hides_last = True
                # An id that was asked for is the reason, even if it is the end token.
                return "stop", token_id if is_asked else None
        if choice.watcher is not None and (found := choice.watcher.push(token_id, may_stop)):
            return "stop", found
        return ("length" if num_output >= request.max_tokens else None), None

    @staticmethod
    def _guided_stop(
        choice: Choice, sequence: Sequence, guide: Guide, token_id: int
    ) -> tuple[FinishReason | None, int | str | None]:
        """:meth:`_stop` for an answer with a grammar.

        The grammar allows an end token only where the answer may end, so it always ends it. Where
        nothing may follow, no end token is needed.
        """
        request = sequence.request
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

    # -- beams --------------------------------------------------------------------------

    @staticmethod
    def _take_candidates(
        logits: StepLogits, sampler: TokenSampler, masks: Masks
    ) -> Iterable[Request]:
        """Give each beam its candidates; returns the requests of these beams."""
        groups = [sequence.request.beams for sequence in logits.beams]
        most = max(group.num_candidates for group in groups if group is not None)
        ids, logprobs = sampler.beam_candidates(logits.beam_logits(), most, masks)
        for row, (sequence, group) in enumerate(zip(logits.beams, groups, strict=True)):
            assert group is not None
            group.take(sequence, BeamCandidates(ids[row], logprobs[row]))
        return dict.fromkeys(sequence.request for sequence in logits.beams)

    def _advance(self, request: Request, now: float) -> Accepted:
        """One step of a beam search; nothing if it waits for some of its beams."""
        group = request.beams
        assert group is not None
        changes = group.advance()
        if changes is None:
            return Accepted((), [], [])
        request.metrics.token_at(now)
        if not group.done:
            return Accepted((), *changes)
        answer = self._answers[request.request_id]
        answer.choices = [
            self._beam_choice(answer, index, output) for index, output in enumerate(group.best())
        ]
        self._counters.generation_tokens += sum(len(each.token_ids) for each in answer.choices)
        return Accepted((answer,), *changes)

    def _beam_choice(self, answer: RequestAnswer, index: int, output: BeamOutput) -> Choice:
        choice = self._choice(answer.request, index)
        for token in output.tokens:
            choice.add(token)
        choice.hides_last = output.eos_token_id is not None
        answer.end(choice, "length" if output.eos_token_id is None else "stop")
        return choice

    # -- prompts ------------------------------------------------------------------------

    def _score_prompts(self, logits: StepLogits, sampler: TokenSampler) -> None:
        for rows in logits.prompt_rows:
            sequence = rows.sequence
            request = sequence.request
            k = request.params.prompt_logprobs
            scores = self._answers[request.request_id].prompt_scores
            assert k is not None
            assert scores is not None
            last = rows.first_row + len(rows.targets)
            tops = sampler.prompt_logprobs(logits.logits[rows.first_row : last], rows.targets, k)
            scores.extend(tops)
            sequence.num_prompt_scored += len(rows.targets)

    def _pool_prompts(self, logits: StepLogits) -> None:
        assert logits.hidden is not None
        states = logits.hidden.take()
        for rows in logits.pooled_rows:
            answer = self._answers[rows.sequence.request.request_id]
            chunk = states[rows.first_row : rows.first_row + rows.num_rows]
            added = chunk.sum(axis=0, dtype=np.float64)
            answer.pooled = added if answer.pooled is None else answer.pooled + added
            rows.sequence.num_prompt_scored += rows.num_rows
