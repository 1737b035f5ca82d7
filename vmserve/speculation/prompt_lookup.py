"""Drafts from a request's own tokens: its prompt, its answer so far and its prediction."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from vmserve import _core
from vmserve.scheduler.sequence import Sequence
from vmserve.speculation.policy import Acceptance, LengthPolicy

__all__ = ["PromptLookup"]

#: Places that a search looks at, newest first, and the length up to which it compares.
_MOST_VISITED, _LONGEST = 256, 32
#: A match as long as this stands for an answer that began as its prediction does.
_AT_THE_BEGINNING = 3


@dataclass(slots=True)
class _Text:
    """A sequence's index in the core, by ``number``."""

    number: int
    prediction: Many[int]
    acceptance: Acceptance = field(default_factory=Acceptance)
    #: Of the match that the last draft came from.
    match_length: int = 0


class PromptLookup:
    """The :class:`~vmserve.speculation.base.Drafter` of one engine.

    Nothing is shared between requests: what one said neither shows in the speed of another, nor
    spoils its drafts. Memory: about 20 bytes a token.
    """

    def __init__(self, policy: LengthPolicy) -> None:
        self._policy = policy
        self._lookups = _core.PromptLookups(_MOST_VISITED, _LONGEST)
        self._texts: dict[Sequence, _Text] = {}
        self._numbers = itertools.count()

    def propose(self, sequences: Many[Sequence], limits: Many[int]) -> list[list[int]]:
        asked = [(seq, limit) for seq, limit in zip(sequences, limits, strict=True) if limit > 0]
        texts = [self._texts.get(seq) or self._open(seq) for seq, _ in asked]
        lengths, drafts = self._lookups.propose(
            [text.number for text in texts],
            [seq.tokens for seq, _ in asked],
            [limit for _, limit in asked],
        )
        for i, (seq, limit) in enumerate(asked):
            if texts[i].prediction and seq.num_output == 1 and lengths[i] < _AT_THE_BEGINNING:
                predicted = texts[i].prediction
                if seq.tokens[-1] == predicted[0]:
                    lengths[i], drafts[i] = _AT_THE_BEGINNING, list(predicted[1 : 1 + limit])
        if any(drafts):
            found = [
                (text.acceptance, length, len(draft))
                for text, length, draft in zip(texts, lengths, drafts, strict=True)
            ]
            for i, num in enumerate(self._policy.lengths(found)):
                texts[i].match_length = lengths[i]
                del drafts[i][num:]
        proposed = iter(drafts)
        return [next(proposed) if limit > 0 else [] for limit in limits]

    def accepted(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        text = self._texts[sequence]
        text.acceptance.learn(text.match_length, num_drafted, num_accepted)

    def forget(self, sequence: Sequence) -> None:
        text = self._texts.pop(sequence, None)
        if text is not None:
            self._lookups.close(text.number)

    def _open(self, sequence: Sequence) -> _Text:
        given = sequence.request.params.prediction
        prediction = () if isinstance(given, str) else given
        text = self._texts[sequence] = _Text(next(self._numbers), prediction)
        self._lookups.open(text.number, list(prediction))
        return text
