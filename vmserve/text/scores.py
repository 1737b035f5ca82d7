"""Log-probabilities of a prompt in columns: a few arrays instead of objects per position."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import overload

from vmserve.sampling.tokens import TopTokens
from vmserve.types import Logprob

__all__ = ["Columns", "PromptScores"]

Position = dict[int, Logprob] | None
#: Columns in this machine's byte order: the number of entries of each position (int32). Then the id
#: (int32), log-probability (float64) and rank (int32) of each entry.
Columns = tuple[bytes, bytes, bytes, bytes]


class PromptScores(Sequence[Position]):
    """Log-probabilities of tokens at each position of a prompt, the prompt's own token first.

    The first position has None. Mappings are made when they are read. ``text``: returns a token's
    :attr:`Logprob.decoded_token`; None for requests without text.
    """

    __slots__ = ("_ends", "_ids", "_logprobs", "_ranks", "_text")

    def __init__(self, text: Callable[[int], str] | None) -> None:
        self._text = text
        #: The end of each position's entries.
        self._ends = array("q", [0])
        self._ids, self._logprobs, self._ranks = array("i"), array("d"), array("i")

    @classmethod
    def unpack(cls, columns: Columns, text: Callable[[int], str] | None) -> PromptScores:
        """Restore what :meth:`pack` returned."""
        scores = cls(text)
        packed_counts, packed_ids, packed_logprobs, packed_ranks = columns
        scores._ends = array("q", accumulate(array("i", packed_counts)))
        scores._ids, scores._ranks = array("i", packed_ids), array("i", packed_ranks)
        scores._logprobs = array("d", packed_logprobs)
        return scores

    def pack(self) -> Columns:
        """Pack for a message to another process of this machine."""
        counts, begin = array("i"), 0
        for end in self._ends:
            counts.append(end - begin)
            begin = end
        return (
            counts.tobytes(),
            self._ids.tobytes(),
            self._logprobs.tobytes(),
            self._ranks.tobytes(),
        )

    def extend(self, tops: Iterable[TopTokens]) -> None:
        """Add the next positions."""
        for top in tops:
            self._ids.extend(top)
            for logprob, rank in top.values():
                self._logprobs.append(logprob)
                self._ranks.append(rank)
            self._ends.append(len(self._ids))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, place: int) -> Position: ...
    @overload
    def __getitem__(self, place: slice) -> list[Position]: ...
    def __getitem__(self, place: int | slice) -> Position | list[Position]:
        if isinstance(place, slice):
            return [self._at(each) for each in range(*place.indices(len(self)))]
        return self._at(range(len(self))[place])

    def __iter__(self) -> Iterator[Position]:
        return map(self._at, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(_same, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def _at(self, place: int) -> Position:
        begin = self._ends[place - 1] if place else 0
        end, text = self._ends[place], self._text
        if begin == end:
            return None
        return {
            token_id: Logprob(
                self._logprobs[at], self._ranks[at], None if text is None else text(token_id)
            )
            for at, token_id in enumerate(self._ids[begin:end], begin)
        }


def _same(one: Position, other: object) -> bool:
    return one == other
