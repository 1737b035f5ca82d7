"""Beam search for one prompt, one step at a time, with the results of ``transformers``.

The search decides; its driver owns the model, the KV memory and the batch. It starts with one beam,
the prompt. Each step, the driver brings the likeliest next tokens of every beam with their
log-probabilities, and gets the next beams: the parent of each, and its token.

A step decides (``transformers`` 5.23, ``generate`` with ``num_beams`` = ``num_return_sequences`` =
width, without sampling):

- Continuations of all beams are ranked together by the sum of their tokens' log-probabilities.
- An end-of-sequence token (EOS) among the first ``width`` of that ranking finishes a hypothesis.
  One further down is dropped: it must not push out what better beams may still become.
- The first ``width`` continuations that are no EOS are the next beams, in that order.
- At ``max_tokens`` tokens, the first ``width`` of the ranking are finished, EOS or not.
- A hypothesis scores its sum / length ** ``length_penalty``. The length counts generated tokens,
  its EOS too. The ``width`` best finished hypotheses are kept.

The search ends at the length limit, or once ``width`` hypotheses are finished: at once with
``early_stopping`` True or a width of 1 (greedy search), else when the best beam at its present sum
would not score more than the worst of them. For that, its length is the present one, or
``max_tokens`` with "never" and a penalty above 0. (With False and such a penalty a longer answer
that would still win may be missed. That is the heuristic of ``transformers``, kept on purpose.)

``width`` + number of EOS ids candidates for each beam are enough, although ``transformers`` ranks
(1 + number of EOS ids) * width over the vocabulary: a beam gives the next step at most ``width``
continuations, and above these its own ranking has at most as many tokens as there are EOS ids.

Equal sums: the lower beam goes first, then the better token of that beam, then the lower id
(``torch.topk`` leaves this open). A kept hypothesis goes before a new one of the same score. Two
deviations, where ``transformers`` fills up with copies of its first beam: if the vocabulary has
fewer continuations than ``width``, there are fewer beams and answers; and a finished hypothesis
counts however low its score is. Sums are float64 (there: float32), so that long answers lose
nothing.

Histories are chains of links to parents, shared by beams. So a step costs the same however long the
answers are, and what no beam leads to is freed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["BeamSearch", "BeamStep", "Continuation", "EarlyStopping", "Hypothesis"]

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam of the step before, ``parent``, with one more token.

    ``logprob`` is that token's, ``total`` the sum over all generated tokens.
    """

    parent: int
    token_id: int
    logprob: float
    total: float


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What one step decided.

    ``running``: the next beams, best first; beam i continues beam ``running[i].parent`` of this
    step. A parent may occur several times or not at all. Empty when ``done``. ``finished``: the
    hypotheses finished by this step and kept so far, best first; their last token needs no KV.
    """

    running: tuple[Continuation, ...]
    finished: tuple[Continuation, ...]
    done: bool


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished answer. ``eos_token_id``: its last token, or None if it has ``max_tokens``."""

    token_ids: list[int]
    logprobs: list[float]
    cumulative_logprob: float
    score: float
    eos_token_id: int | None


@dataclass(slots=True, eq=False, repr=False)
class _Link:
    """The last token of a beam. The links of a step's beams have the same depth."""

    parent: _Link | None
    token_id: int
    logprob: float


@dataclass(slots=True, eq=False, repr=False)
class _Finished:
    link: _Link
    continuation: Continuation
    score: float
    eos_token_id: int | None


class BeamSearch:
    """The beams and finished hypotheses of one prompt. Not thread-safe.

    At most ``width`` beams run and at most ``width`` hypotheses are kept. An empty
    ``eos_token_ids`` makes every token an ordinary one. The first ``min_tokens`` tokens are never
    an EOS: such candidates are skipped, and the probabilities of the others stay the same.
    """

    def __init__(
        self,
        width: int,
        max_tokens: int,
        *,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        eos_token_ids: Iterable[int] = (),
        min_tokens: int = 0,
    ) -> None:
        if width < 1 or max_tokens < 1:
            raise ValueError(f"width ({width}) and max_tokens ({max_tokens}) must be at least 1")
        if not isinstance(early_stopping, bool) and early_stopping != "never":
            raise ValueError(f'early_stopping must be True, False or "never", not {early_stopping}')
        self.width = width
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.eos_token_ids = frozenset(eos_token_ids)
        self.done = False
        #: Tokens that each running beam has generated.
        self.length = 0
        self._links: list[_Link | None] = [None]
        self._totals = np.zeros(1)
        self._finished: list[_Finished] = []

    @property
    def num_beams(self) -> int:
        """Number of running beams, and of rows that the next :meth:`advance` takes; 0 when done."""
        return len(self._links)

    @property
    def num_candidates(self) -> int:
        """Candidates for each beam that are enough to decide a step."""
        return self.width + len(self.eos_token_ids)

    def advance(self, token_ids: NDArray[np.int64], logprobs: NDArray[np.float32]) -> BeamStep:
        """Rank the candidates of every beam; both arrays are [num_beams, candidates].

        Row i belongs to beam i, best first and the lowest id first among equals, as
        ``Sampler.beam_candidates`` returns it: at least ``num_candidates``, or the whole
        vocabulary. Candidates with log-probability -inf are impossible and skipped.

        Raises ValueError if the search is done, or for other shapes.
        """
        self._check(token_ids, logprobs)
        self.length += 1
        running, finished = self._select(token_ids, logprobs)
        kept = self._keep(finished)
        self._links = [
            _Link(self._links[beam.parent], beam.token_id, beam.logprob) for beam in running
        ]
        self._totals = np.array([beam.total for beam in running])
        self.done = self._is_over()
        if self.done:
            self._links, running = [], []
        return BeamStep(tuple(running), tuple(kept), self.done)

    def token_ids(self, beam: int) -> list[int]:
        """The tokens that running beam ``beam`` has generated so far."""
        return [link.token_id for link in _chain(self._links[beam])]

    def best(self) -> list[Hypothesis]:
        """The finished hypotheses, best first: ``width`` when done, fewer before.

        Fewer when done if the vocabulary does not have that many continuations.
        """
        return [self._hypothesis(finished) for finished in self._finished]

    # -- a step ---------------------------------------------------------------------------

    def _check(self, token_ids: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        if self.done:
            raise ValueError(f"this beam search was done after {self.length} tokens")
        if (
            logprobs.ndim != 2
            or logprobs.shape[0] != self.num_beams
            or logprobs.shape != token_ids.shape
        ):
            raise ValueError(
                f"candidates are {token_ids.shape} ids and {logprobs.shape} log-probabilities, "
                f"expected two arrays of ({self.num_beams}, {self.num_candidates})"
            )

    def _select(
        self, token_ids: NDArray[np.int64], logprobs: NDArray[np.float32]
    ) -> tuple[list[Continuation], list[Continuation]]:
        """The next beams, and hypotheses finished among the first ``width``; both best first."""
        running: list[Continuation] = []
        finished: list[Continuation] = []
        at_limit = self.length == self.max_tokens
        eos_token_ids = self.eos_token_ids
        rank = 0
        for candidate in self._ranked(token_ids, logprobs):
            is_eos = candidate.token_id in eos_token_ids
            if is_eos and self.length <= self.min_tokens:
                continue
            if not (is_eos or at_limit):
                running.append(candidate)
            elif rank < self.width:
                finished.append(candidate)
            rank += 1
            if len(running) == self.width or (at_limit and rank == self.width):
                break
        return running, finished

    def _ranked(
        self, token_ids: NDArray[np.int64], logprobs: NDArray[np.float32]
    ) -> Iterable[Continuation]:
        """The best continuations of all beams together, best first: enough to decide the step."""
        totals = (self._totals[:, None] + logprobs).ravel()
        # At least ``width`` of these are no EOS, as each beam has each EOS id only once.
        enough = self.width * (1 + len(self.eos_token_ids))
        # Stable: among equals the lower beam, then the better place in its row.
        order = np.argsort(-totals, kind="stable")[:enough]
        parents = order // logprobs.shape[1]
        columns = (parents, token_ids.ravel()[order], logprobs.ravel()[order], totals[order])
        for parent, token_id, logprob, total in zip(*(c.tolist() for c in columns), strict=True):
            if not total > -np.inf:
                return
            yield Continuation(parent, token_id, logprob, total)

    def _keep(self, finished: list[Continuation]) -> list[Continuation]:
        """Merge into the ``width`` best; returns which of ``finished`` are among them."""
        if not finished:
            return []
        new = [self._finish(continuation) for continuation in finished]
        # Stable: among equals the kept ones first, then the better sum.
        merged = sorted(self._finished + new, key=lambda f: f.score, reverse=True)
        self._finished = merged[: self.width]
        return [f.continuation for f in new if f in self._finished]

    def _finish(self, continuation: Continuation) -> _Finished:
        token_id = continuation.token_id
        return _Finished(
            _Link(self._links[continuation.parent], token_id, continuation.logprob),
            continuation,
            _score(continuation.total, self.length, self.length_penalty),
            token_id if token_id in self.eos_token_ids else None,
        )

    def _is_over(self) -> bool:
        if not self._links or self.length == self.max_tokens:
            return True
        if len(self._finished) < self.width:
            return False
        if self.early_stopping is True or self.width == 1:
            return True
        hopeful = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_tokens if hopeful else self.length
        attainable = _score(float(self._totals[0]), length, self.length_penalty)
        return attainable <= self._finished[-1].score

    def _hypothesis(self, finished: _Finished) -> Hypothesis:
        links = _chain(finished.link)
        return Hypothesis(
            token_ids=[link.token_id for link in links],
            logprobs=[link.logprob for link in links],
            cumulative_logprob=finished.continuation.total,
            score=finished.score,
            eos_token_id=finished.eos_token_id,
        )


def _score(total: float, length: int, length_penalty: float) -> float:
    """``total`` / ``length`` ** ``length_penalty``; 0 or -inf if the power leaves float64."""
    try:
        return total / math.pow(length, length_penalty)
    except OverflowError:
        return -0.0
    except ZeroDivisionError:
        return -np.inf if total < 0 else total


def _chain(last: _Link | None) -> list[_Link]:
    """The links that lead to ``last``, the first token's first."""
    links = []
    while last is not None:
        links.append(last)
        last = last.parent
    links.reverse()
    return links
