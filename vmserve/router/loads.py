"""How many requests members have in flight, kept so that asking costs the same for any number."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

__all__ = ["Loads"]

#: Number of members kept in the order in which they were chosen: these are likely to be computing a
#: prompt still.
_LAST: Final = 32


class Loads:
    """The loads of members that take requests. A set of members is a number with a bit for each."""

    def __init__(self) -> None:
        self._of: dict[int, float] = {}
        #: Members by load.
        self._at: dict[float, int] = {}
        self._had_turn = 0
        #: Members chosen last, in this order, and as a set.
        self._last: OrderedDict[int, None] = OrderedDict()
        self._lately = 0
        #: All members that take requests, and the sum of their loads.
        self.takers = 0
        self.total = 0.0

    def __len__(self) -> int:
        return len(self._of)

    def set(self, member: int, load: float | None) -> None:
        """Note the load of one member; None: it takes no requests."""
        before = self._of.pop(member, None)
        if before is not None:
            self.takers ^= member
            self.total -= before
            self._at[before] ^= member
            if not self._at[before]:
                del self._at[before]
        if load is not None:
            self._of[member] = load
            self.takers |= member
            self.total += load
            self._at[load] = self._at.get(load, 0) | member

    def least(self, among: int) -> tuple[float, int]:
        """The least load of those ``among`` that take requests, of which there are some, and which
        have it."""
        for load in sorted(self._at):
            if found := self._at[load] & among:
                return load, found
        raise ValueError("none of them takes requests")

    def next(self, among: int) -> int:
        """One of some members: the one that was chosen longest ago.

        Of those that were not chosen lately: the one that had no turn since all of these had one.
        """
        others = among & ~self._lately
        if not others:
            return next(each for each in self._last if each & among)
        waiting = others & ~self._had_turn
        if not waiting:
            self._had_turn &= ~others
            waiting = others
        return waiting & -waiting

    def turn(self, member: int) -> None:
        """Note that a member was chosen."""
        self._had_turn |= member
        self._lately |= member
        self._last[member] = None
        self._last.move_to_end(member)
        if len(self._last) > _LAST:
            self._lately ^= self._last.popitem(last=False)[0]
