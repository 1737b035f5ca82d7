"""Several drafters: the first that has drafts for a step."""

from __future__ import annotations

from collections.abc import Sequence as Many

from vmserve.scheduler.sequence import Sequence
from vmserve.speculation.base import Drafter

__all__ = ["InOrder"]


class InOrder:
    """A :class:`~vmserve.speculation.base.Drafter` of others, the cheapest first.

    A step has the drafts of one of them, which alone learns what became of it. All learn from steps
    without drafts.
    """

    def __init__(self, *drafters: Drafter) -> None:
        self._drafters = drafters
        self._chosen: Drafter | None = None

    def wanted(self, num_decoding: int) -> bool:
        return any(drafter.wanted(num_decoding) for drafter in self._drafters)

    def propose(self, sequences: Many[Sequence], num_prompt_rows: int) -> Many[list[int]] | None:
        self._chosen = None
        for drafter in self._drafters:
            drafts = drafter.propose(sequences, num_prompt_rows)
            if drafts is not None and any(drafts):
                self._chosen = drafter
                return drafts
        return None

    def accepted(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        assert self._chosen is not None
        self._chosen.accepted(sequence, num_drafted, num_accepted)

    def learn(self, seconds: float, attention: float) -> None:
        for drafter in self._drafters if self._chosen is None else (self._chosen,):
            drafter.learn(seconds, attention)
        self._chosen = None

    def forget(self, sequence: Sequence) -> None:
        for drafter in self._drafters:
            drafter.forget(sequence)

    def start_over(self) -> None:
        self._chosen = None
        for drafter in self._drafters:
            drafter.start_over()
