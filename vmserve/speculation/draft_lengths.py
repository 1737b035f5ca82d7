"""How long the drafts of a draft model are: as long as pays, or as long as asked."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from vmserve import _core
from vmserve.scheduler.sequence import Sequence
from vmserve.speculation.policy import DraftPolicy

__all__ = ["Decoding", "DraftLengths"]


class Decoding(NamedTuple):
    """A sequence of a step. The draft model has to read ``num_unread`` of its tokens before it can
    draft ``most`` tokens."""

    sequence: Sequence
    num_unread: int
    most: int


class DraftLengths:
    """Chooses lengths for a batch, by prices and by what was accepted of each sequence's drafts."""

    def __init__(self, policy: DraftPolicy) -> None:
        self._core = _core.DraftLengths(policy)
        self._numbers: dict[Sequence, int] = {}
        self._unused = itertools.count()

    def may_pay(self, num_decoding: int) -> bool:
        return self._core.may_pay(num_decoding)

    def choose(self, decoding: Iterable[Decoding], num_prompt_rows: int) -> list[int]:
        """A length for each sequence of a step."""
        return self._core.choose(
            [
                (
                    self._number(sequence) if most > 0 else -1,
                    sequence.num_tokens,
                    num_unread,
                    most,
                    sequence.request.max_tokens - sequence.num_output,
                )
                for sequence, num_unread, most in decoding
            ],
            num_prompt_rows,
        )

    def ran(self, num_rows: int, num_sequences: int, seconds: float) -> None:
        """Take how long a step of the draft model took."""
        self._core.ran(num_rows, num_sequences, seconds)

    def accepted(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        self._core.accepted(self._numbers[sequence], num_drafted, num_accepted)

    def learn(self, seconds: float, attention: float) -> None:
        self._core.learn(seconds, attention)

    def forget(self, sequence: Sequence) -> None:
        if (number := self._numbers.pop(sequence, None)) is not None:
            self._core.close(number)

    def start_over(self) -> None:
        """Forget all sequences."""
        for sequence in list(self._numbers):
            self.forget(sequence)

    def _number(self, sequence: Sequence) -> int:
        if sequence not in self._numbers:
            number = self._numbers[sequence] = next(self._unused)
            self._core.open(number)
        return self._numbers[sequence]
