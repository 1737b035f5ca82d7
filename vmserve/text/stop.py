"""Find stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vmserve.text.detokenizer import IncrementalDetokenizer, TokenTable

if TYPE_CHECKING:
    from vmserve.sampling.params import SamplingParams

__all__ = ["StopChecker", "StopStrings", "StopWatcher"]


class StopStrings:
    """The stop strings of a request; its choices share them.

    There is one automaton per string (Knuth, Morris and Pratt, 1977), so that a character takes
    constant time on average for any strings and any text. Of an automaton only as much is made as
    the answers have matched: strings may be long, and are seldom met.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        #: Stop strings, longest first.
        self.texts = sorted(set(stops), key=len, reverse=True)
        self.first = frozenset(stop[0] for stop in self.texts)
        #: For the first prefixes of each string: length of the prefix's longest proper suffix that
        #: begins the string.
        self._failures = [[0] for _ in self.texts]

    def after(self, place: int, matched: int, char: str) -> int:
        """How many of its first characters the text ends with, if it ended with ``matched`` of the
        string at ``place`` and ``char`` is added."""
        stop = self.texts[place]
        if stop[matched] == char:
            return matched + 1
        failures = self._failures[place]
        if len(failures) < matched:
            _extend(failures, stop, matched)
        while matched and stop[matched] != char:
            matched = failures[matched - 1]
        return matched + (stop[matched] == char)


class StopChecker:
    """Passes text through until a stop string is complete.

    Text that may be the beginning of a stop string is held back: at most one character less than
    the longest string has. The string that is complete first wins, and the longest of those that
    end with the same character. What is released does not depend on how the text was cut.
    """

    def __init__(self, stops: StopStrings, include_stop_str: bool = False) -> None:
        self._stops = stops
        self._include = include_stop_str
        self._first = stops.first
        #: Number of each string's first characters that the text ends with.
        self._matched = [0] * len(stops.texts)
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
        self._matched = [0] * len(self._matched)
        return held

    def _advance(self, char: str) -> str | None:
        """Add one character; returns the longest stop string that it completes, or None."""
        stops, matched = self._stops, self._matched
        for place, stop in enumerate(stops.texts):
            matched[place] = stops.after(place, matched[place], char)
            if matched[place] == len(stop):
                return stop  # the strings are sorted by length
        return None


class StopWatcher:
    """Finds the stop string that ends a sequence of tokens; keeps no text.

    The rules are those of :class:`~vmserve.text.stream.ChoiceStream`.
    """

    def __init__(self, table: TokenTable, params: SamplingParams, stops: StopStrings) -> None:
        self._piece = IncrementalDetokenizer(table, params.skip_special_tokens).push
        self._checker = StopChecker(stops)

    def push(self, token_id: int, may_stop: bool) -> str | None:
        """Add a token; returns the stop string that it completes, or None.

        ``may_stop`` False: the token's text is not part of any stop string.
        """
        piece = self._piece(token_id)
        if may_stop:
            return self._checker.push(piece)[1]
        self._checker.flush()
        return None


def _extend(failures: list[int], stop: str, num: int) -> None:
    """Append until there are ``num``."""
    length = failures[-1]
    for char in stop[len(failures) : num]:
        while length and stop[length] != char:
            length = failures[length - 1]
        if stop[length] == char:
            length += 1
        failures.append(length)
