"""Which blocks of which prompts members have been sent, as chains of hashes."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

__all__ = ["ChainTable", "chain_of"]

_TOKEN_BYTES = 8


def chain_of(token_ids: Sequence[int], root: Hashable, block_tokens: int) -> list[int]:
    """Hash each full block of a prompt together with all before it.

    Chains of different ``root`` have nothing in common. The hashes are Python's own: those of bytes
    are keyed anew in each process, and nothing but a choice depends on them.
    """
    data = array("q", token_ids).tobytes()
    size = block_tokens * _TOKEN_BYTES
    value = hash(root)
    chain = []
    for start in range(0, len(data) - size + 1, size):
        value = hash((value, data[start : start + size]))
        chain.append(value)
    return chain


class ChainTable:
    """The blocks that each member was sent, least recently used ones forgotten first.

    Blocks of a member are at most its capacity, and at most its part of ``max_blocks``.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._capacity: dict[str, int] = {}
        #: Blocks of each member, with the turn in which each was last sent.
        self._blocks: dict[str, OrderedDict[int, int]] = {}
        #: Bit of each member, and for each block the bits of those that have it.
        self._bits: dict[str, int] = {}
        self._holders: dict[int, int] = {}
        #: Bit of the member to which a block was sent last.
        self._last: dict[int, int] = {}
        self._names: dict[int, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._bits

    @property
    def members(self) -> Collection[str]:
        return self._bits.keys()

    def bit_of(self, name: str) -> int:
        """The number that stands for a member in sets of them: one bit, until it leaves."""
        return self._bits[name]

    def name_of(self, bit: int) -> str:
        return self._names[bit.bit_length() - 1]

    @property
    def num_blocks(self) -> int:
        """Blocks of all members; one that several have counts for each."""
        return sum(map(len, self._blocks.values()))

    def join(self, name: str, capacity: int) -> None:
        """Add a member that has nothing."""
        bit = next(bit for bit in range(len(self._bits) + 1) if bit not in self._names)
        self._names[bit], self._bits[name] = name, 1 << bit
        self._capacity[name], self._blocks[name] = capacity, OrderedDict()
        for each in self._blocks:
            self._shrink(each)

    def leave(self, name: str) -> None:
        self.forget(name)
        bit = self._bits.pop(name)
        del self._names[bit.bit_length() - 1], self._capacity[name], self._blocks[name]

    def forget(self, name: str) -> None:
        """Note that a member has nothing any more."""
        blocks = self._blocks[name]
        while blocks:
            self._drop_oldest(name)

    def add(self, name: str, chain: Sequence[int], turn: int) -> None:
        """Note that a member is sent these blocks now. A chain's last ones are forgotten first."""
        blocks, holders, bit = self._blocks[name], self._holders, self._bits[name]
        for value in reversed(chain):
            self._last[value] = bit
            if value in blocks:
                blocks.move_to_end(value)
            else:
                holders[value] = holders.get(value, 0) | bit
            blocks[value] = turn
        self._shrink(name)

    def matches(self, chain: Iterable[int]) -> list[tuple[int, int]]:
        """Sets of members that have the same number of a chain's first blocks, and how many.

        The longest last; those that have none are in none.
        """
        found: list[tuple[int, int]] = []
        alive = -1
        length = 0
        for value in chain:
            still = alive & self._holders.get(value, 0)
            if still != alive and length:
                found.append((alive & ~still, length))
            alive = still
            if not alive:
                return found
            length += 1
        return [*found, (alive, length)] if length else found

    def last_sent(self, block: int, among: int) -> tuple[int, int]:
        """The member that was sent a block last, of some that have it, and when."""
        last = self._last[block]
        if not last & among:  # it has forgotten the block, or takes no requests
            last = max(self._each(among), key=lambda bit: self._blocks[self.name_of(bit)][block])
        return last, self._blocks[self.name_of(last)][block]

    @staticmethod
    def _each(members: int) -> Iterator[int]:
        while members:
            bit = members & -members
            yield bit
            members ^= bit

    def _shrink(self, name: str) -> None:
        limit = min(self._capacity[name], self._max_blocks // len(self._blocks))
        while len(self._blocks[name]) > limit:
            self._drop_oldest(name)

    def _drop_oldest(self, name: str) -> None:
        value, _ = self._blocks[name].popitem(last=False)
        left = self._holders[value] & ~self._bits[name]
        if left:
            self._holders[value] = left
        else:
            del self._holders[value], self._last[value]
