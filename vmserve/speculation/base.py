"""The seam between the engine and what proposes tokens.

A draft changes nothing but speed: the engine accepts a drafted token only if the sampler draws that
very token at that position.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from vmserve.scheduler.sequence import Sequence

__all__ = ["Drafter"]


class Drafter(Protocol):
    """Proposes what sequences may say next, and learns what became of it and what it cost.

    A step proposes once, reports each draft that was computed, and learns.
    """

    def wanted(self, num_decoding: int) -> bool:
        """Whether a step of so many decoding sequences may get drafts."""
        ...

    def propose(self, sequences: Many[Sequence], num_prompt_rows: int) -> Many[list[int]] | None:
        """A draft for each decoding sequence of a step that also computes ``num_prompt_rows`` rows
        of prompts; None: no drafts.

        Reads each sequence's known tokens; it catches up with whatever was appended since the last
        call. The engine cuts what an answer or the step has no room for.
        """
        ...

    def accepted(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Take the outcome of the draft that ``sequence`` computed in the step just collected."""
        ...

    def learn(self, seconds: float, attention: float) -> None:
        """Take how long the step took, with or without drafts: all of it, and its attention."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that finished or was aborted. Unknown ones are fine."""
        ...

    def start_over(self) -> None:
        """Drop what is kept of all sequences, also after a call that ended halfway."""
        ...
