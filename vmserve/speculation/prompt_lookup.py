"""Drafts from a request's own tokens: its prompt, its answer so far and its prediction."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many

from vmserve import _core
from vmserve.scheduler.sequence import Sequence
from vmserve.speculation.policy import DraftPolicy

__all__ = ["PromptLookup"]

#: Number of sequences without drafts.
_NONE = -1


class PromptLookup:
    """The :class:`~vmserve.speculation.base.Drafter` of one engine.

    Nothing is shared between requests: what one said neither shows in the speed of another, nor
    spoils its drafts. Memory: about 20 bytes a token.
    """

    def __init__(self, policy: DraftPolicy) -> None:
        self._drafter = _core.PromptDrafter(policy)
        #: Numbers by which the core knows the sequences.
        self._numbers: dict[Sequence, int] = {}
        self._unused = itertools.count()

    def wanted(self, num_decoding: int) -> bool:
        return self._drafter.may_pay(num_decoding)

    def propose(self, sequences: Many[Sequence], num_prompt_rows: int) -> Many[list[int]] | None:
        known = self._numbers
        numbers = [known[seq] if seq in known else self._open(seq) for seq in sequences]
        return self._drafter.propose(numbers, [seq.tokens for seq in sequences], num_prompt_rows)

    def accepted(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        self._drafter.accepted(self._numbers[sequence], num_drafted, num_accepted)

    def learn(self, seconds: float, attention: float) -> None:
        self._drafter.learn(seconds, attention)

    def forget(self, sequence: Sequence) -> None:
        number = self._numbers.pop(sequence, _NONE)
        if number != _NONE:
            self._drafter.close(number)

    def start_over(self) -> None:
        for sequence in list(self._numbers):
            self.forget(sequence)

    def _open(self, sequence: Sequence) -> int:
        request = sequence.request
        number = _NONE
        if request.params.speculative and request.beams is None:
            number = next(self._unused)
            given = request.params.prediction
            before = () if isinstance(given, str) else given
            num_prompt = sequence.num_prompt
            self._drafter.open(number, before, num_prompt, num_prompt + request.max_tokens)
        self._numbers[sequence] = number
        return number
