"""The seam between the engine and what proposes tokens.

A draft changes nothing but speed: the engine accepts a drafted token only if the sampler draws that
very token at that position.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from vmserve.scheduler.sequence import Sequence

__all__ = ["Drafter", "Speculation", "SpeculationPolicy"]


class Drafter(Protocol):
    """Proposes what a sequence may say next, and hears what became of it."""

    def propose(self, sequences: Many[Sequence], limits: Many[int]) -> list[list[int]]:
        """A draft for each sequence: at most ``limits[i]`` tokens, ``[]`` where there is none.

        Reads each sequence's known tokens; it catches up with whatever was appended since the last
        call. A limit of 0 asks for nothing.
        """
        ...

    def accepted(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Take the outcome of the draft that ``sequence`` computed in the step just collected."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that finished or was aborted. Unknown ones are fine."""
        ...


class SpeculationPolicy(Protocol):
    """Says how many drafted tokens each sequence may add to a step."""

    def limits(self, decoding: Many[Sequence], num_prompt_rows: int) -> list[int]:
        """The most drafted tokens of each decoding sequence in a step that also computes
        ``num_prompt_rows`` rows of prompts; 0: none."""
        ...

    def learn(self, num_rows: int, seconds: float) -> None:
        """Take how long the model took for a step of ``num_rows`` rows, prompts' included."""
        ...


@dataclass(frozen=True, slots=True)
class Speculation:
    """What an engine that speculates has besides its other parts."""

    drafter: Drafter
    policy: SpeculationPolicy
