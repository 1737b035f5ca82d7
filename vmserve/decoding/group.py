"""The sequences of a beam search: makes forks and ends of what the search decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vmserve.sampling.tokens import BeamCandidates, BeamOutput, SampledToken
from vmserve.scheduler.sequence import Changes, Sequence, SequenceStatus

if TYPE_CHECKING:
    from vmserve.decoding.beam import BeamSearch, BeamStep, Hypothesis
    from vmserve.scheduler.sequence import Request

__all__ = ["BeamGroup"]

#: Token id -> (log-probability, rank).
_Top = dict[int, tuple[float, int]]


@dataclass(slots=True)
class _Beam:
    sequence: Sequence
    #: Log-probabilities of each generated token, if they are asked for.
    tops: list[_Top] = field(default_factory=list)
    candidates: BeamCandidates | None = None


class BeamGroup:
    """The beams of a request. They wait for each other: a search step needs candidates of all.

    Candidates may come from different steps of the engine, for example after a preemption.
    ``num_logprobs``: how many likeliest tokens to keep for each position of an answer.
    """

    def __init__(self, request: Request, search: BeamSearch, num_logprobs: int | None) -> None:
        self._request = request
        self._search = search
        self._num_logprobs = num_logprobs
        [first] = request.sequences
        self._beams = [_Beam(first)]
        #: Log-probabilities of finished answers, by their tokens.
        self._finished_tops: dict[tuple[int, ...], list[_Top]] = {}

    @property
    def done(self) -> bool:
        return self._search.done

    @property
    def num_candidates(self) -> int:
        return max(self._search.num_candidates, self._num_logprobs or 0)

    def take(self, sequence: Sequence, candidates: BeamCandidates) -> None:
        """Take the candidates of a sequence that has computed all its tokens."""
        beam = next(beam for beam in self._beams if beam.sequence is sequence)
        num = self.num_candidates
        beam.candidates = BeamCandidates(candidates.token_ids[:num], candidates.logprobs[:num])

    def advance(self) -> Changes | None:
        """One step of the search; None if a beam is not ready for it."""
        rows = []
        for beam in self._beams:
            # A beam that was preempted computes its tokens again before it can be forked.
            if beam.candidates is None or beam.sequence.num_uncomputed > 0:
                return None
            rows.append(beam.candidates)
        step = self._search.advance(
            np.stack([row.token_ids for row in rows]), np.stack([row.logprobs for row in rows])
        )
        if self._num_logprobs is not None:
            self._keep_tops(step)
        return self._continue(step)

    def best(self) -> list[BeamOutput]:
        """The answers, best first; before the search is done, those finished so far."""
        return [self._output(hypothesis) for hypothesis in self._search.best()]

    def running(self) -> list[list[int]]:
        """The tokens that each running beam has generated, best beam first."""
        return [beam.sequence.output_token_ids for beam in self._beams]

    def _continue(self, step: BeamStep) -> Changes:
        """Continue each beam in its own sequence; each further continuation is a fork."""
        going_on = {continuation.parent for continuation in step.running}
        parents = self._beams
        changes = Changes([b.sequence for i, b in enumerate(parents) if i not in going_on], [])
        taken = {parents[place].sequence.index for place in going_on}
        free = iter(sorted(set(range(self._search.width)) - taken))
        self._beams, appended = [], []
        continued: set[int] = set()
        for continuation in step.running:
            parent = parents[continuation.parent]
            sequence, tops = parent.sequence, parent.tops
            if continuation.parent in continued:
                sequence = self._fork(parent.sequence, next(free))
                changes.forks.append((parent.sequence, sequence))
                tops = list(parent.tops)
            continued.add(continuation.parent)
            self._beams.append(_Beam(sequence, tops))
            appended.append((parent, continuation))
        for beam, (parent, continuation) in zip(self._beams, appended, strict=True):
            beam.sequence.tokens.append(continuation.token_id)
            if beam.sequence.guide is not None:
                beam.sequence.guide.accept(continuation.token_id)
            if self._num_logprobs is not None:
                beam.tops.append(self._top(parent, continuation.token_id, continuation.logprob))
        self._request.sequences = [beam.sequence for beam in self._beams]
        return changes

    def _fork(self, parent: Sequence, index: int) -> Sequence:
        return Sequence(
            self._request,
            index,
            list(parent.tokens),
            parent.num_prompt,
            status=SequenceStatus.FOLLOWING,
            guide=None if parent.guide is None else parent.guide.fork(),
        )

    def _keep_tops(self, step: BeamStep) -> None:
        for continuation in step.finished:
            parent = self._beams[continuation.parent]
            tokens = (*parent.sequence.output_token_ids, continuation.token_id)
            top = self._top(parent, continuation.token_id, continuation.logprob)
            self._finished_tops[tokens] = [*parent.tops, top]

    def _top(self, beam: _Beam, token_id: int, logprob: float) -> _Top:
        """The token itself, then the likeliest tokens of its position."""
        assert beam.candidates is not None
        ids, logprobs = beam.candidates.token_ids.tolist(), beam.candidates.logprobs.tolist()
        top: _Top = {token_id: (logprob, ids.index(token_id) + 1)}
        for rank, other in enumerate(ids[: self._num_logprobs], start=1):
            top[other] = (logprobs[rank - 1], rank)
        return top

    def _output(self, hypothesis: Hypothesis) -> BeamOutput:
        token_ids, logprobs = hypothesis.token_ids, hypothesis.logprobs
        tops: list[_Top | None] = [None] * len(token_ids)
        if self._num_logprobs is not None:
            tops = list(self._finished_tops[tuple(token_ids)])
        tokens = [SampledToken(*token) for token in zip(token_ids, logprobs, tops, strict=True)]
        return BeamOutput(tokens, hypothesis.eos_token_id)
