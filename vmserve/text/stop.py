"""Find stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vmserve.text.detokenizer import IncrementalDetokenizer, TokenTable

if TYPE_CHECKING:
    from vmserve.sampling.params import SamplingParams

__all__ = ["StopChecker", "StopWatcher"]


class StopChecker:
    """Passes text through until a stop string is complete.

    Text that may be the beginning of a stop string is held back: at most one character less than
    the longest string has. The string that is complete first wins, and the longest of those that
    end with the same character. What is released does not depend on how the text was cut.

    There is one automaton per string (Knuth, Morris and Pratt, 1977), so that a character takes
    constant time on average for any strings and any text.
    """

    def __init__(self, stops: Sequence[str], include_stop_str: bool = False) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include_stop_str
        self._first = frozenset(stop[0] for stop in self._stops)
        self._failures = [_failures(stop) for stop in self._stops]
        #: For each string, how many of its first characters the text ends with.
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.stopped = False

    @property
    def num_held(self) -> int:
        """Number of characters that are held back."""
        return len(self._held)

    def push(self, piece: str) -> tuple[str, str | None]:
        """Add a piece; returns the text that it releases and the stop string that it completes.

        With a stop string, the text ends before it (or after it, with ``include_stop_str``), and
        nothing can be pushed any more.
        """
        if self.stopped:
            raise ValueError("the text has ended with a stop string")
        if not self._held and self._first.isdisjoint(piece):
            return piece, None
        text = self._held + piece
        for place, char in enumerate(piece, start=len(self._held) + 1):
            stop = self._advance(char)
            if stop is not None:
                self.stopped = True
                self._held = ""
                return text[: place if self._include else place - len(stop)], stop
        cut = len(text) - max(self._matched)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """Release the text that was held back: no stop string can claim it any more."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        """Add one character; returns the longest stop string that it completes, or None."""
        for i, stop in enumerate(self._stops):
            length = self._matched[i]
            while length and stop[length] != char:
                length = self._failures[i][length - 1]
            if stop[length] == char:
                length += 1
            self._matched[i] = length
            if length == len(stop):
                return stop  # the strings are sorted by length
        return None


class StopWatcher:
    """Finds the stop string that ends a sequence of tokens; keeps no text.

    The rules are those of :class:`~vmserve.text.stream.ChoiceStream`.
    """

    def __init__(self, table: TokenTable, params: SamplingParams) -> None:
        self._piece = IncrementalDetokenizer(table, params.skip_special_tokens).push
        self._checker = StopChecker(params.stop)

    def push(self, token_id: int, may_stop: bool) -> str | None:
        """Add a token; returns the stop string that it completes, or None.

        ``may_stop`` False: the token's text is not part of any stop string.
        """
        piece = self._piece(token_id)
        if may_stop:
            return self._checker.push(piece)[1]
        self._checker.flush()
        return None


def _failures(stop: str) -> list[int]:
    """For each prefix of ``stop``, the length of its longest proper suffix that begins ``stop``."""
    lengths = [0]
    length = 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = lengths[length - 1]
        if stop[length] == char:
            length += 1
        lengths.append(length)
    return lengths
