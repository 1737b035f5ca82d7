"""Chooses a member for each request, without clocks, threads or messages.

The caller notes which members take requests and how many each has in flight, whenever that changes
and as a whole number of its own, so no count of the router's can drift. A choice costs the same for
any number of members. Policies:

- ``prefix``: the best score, which is the part of the prompt that a member is expected to have in
  its prefix cache, minus what its load is above the mean, in means. A hot prefix, which is asked
  for more often than once in as many turns as there are members, so spills over to members that
  have less to do, and all that have it are equal. One that is not hot has a home, the member that
  was sent it last: older copies count for nothing, and the load counts less.
- ``least-loaded``: the least load.
- ``round-robin``: the member that was chosen longest ago.

Members that are equal take turns. What is expected to be cached is what was sent
(:class:`~vmserve.router.chains.ChainTable`): members say nothing of their caches (decision 0071).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from vmserve.router.chains import ChainTable, chain_of
from vmserve.router.loads import Loads

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Sequence

__all__ = ["Policy", "Reason", "Router", "Routing"]

Policy = Literal["prefix", "least-loaded", "round-robin"]
#: "only": no other takes requests. "prefix": no other has more of the prompt. "spill": another has
#: more of it, and too much to do. "least": none has any of it. "turn": round robin.
Reason = Literal["only", "prefix", "spill", "least", "turn"]

#: Most blocks of all members together; a block takes 250 bytes.
_MAX_BLOCKS = 1 << 22
#: Weights of the load, for a prefix that is hot and for others. With less than 0.5, a prefix stays
#: with one of two members while the other is idle.
_HOT_WEIGHT, _CALM_WEIGHT = 1.0, 0.6


class Routing(NamedTuple):
    """``cached_tokens``: of the prompt's first ones, as many as the member should have cached."""

    member: str
    reason: Reason
    cached_tokens: int


class Router:
    """See the module's docstring. Not thread-safe.

    ``block_tokens``: of members' prefix caches. ``table``: their blocks, by default those sent.
    """

    def __init__(
        self,
        policy: Policy = "prefix",
        *,
        block_tokens: int,
        table: ChainTable | None = None,
    ) -> None:
        self.policy: Policy = policy
        self._block_tokens = block_tokens
        self._table = ChainTable(_MAX_BLOCKS) if table is None else table
        self._loads = Loads()
        self._turn = 0

    @property
    def members(self) -> Collection[str]:
        return self._table.members

    @property
    def num_blocks(self) -> int:
        """Blocks that are remembered."""
        return self._table.num_blocks

    def join(self, member: str, cache_blocks: int) -> None:
        """Add a member, or one anew that has restarted. ``cache_blocks`` 0: no prefix cache.

        ``cache_blocks``: as many as its prefix cache can have. It takes no requests before
        :meth:`note`.
        """
        self.leave(member)
        self._table.join(member, cache_blocks)

    def leave(self, member: str) -> None:
        """Forget a member. One that is unknown is ignored."""
        if member in self._table:
            self._loads.set(self._table.bit_of(member), None)
            self._table.leave(member)

    def forget(self, member: str) -> None:
        """Note that a member's prefix cache is empty."""
        self._table.forget(member)

    def note(self, member: str, load: float | None) -> None:
        """Note how many requests a member has in flight now; None: it takes no others."""
        self._loads.set(self._table.bit_of(member), load)

    def choose(self, token_ids: Sequence[int], root: Hashable) -> Routing:
        """Choose the member that gets a request, and expect the prompt in its cache from now on.

        ``root``: what the prefix cache separates requests by (isolation and salt). There has to be
        a member that takes requests.
        """
        self._turn += 1
        loads = self._loads
        reason: Reason
        if self.policy == "prefix":
            chosen, reason, blocks = self._by_prefix(token_ids, root)
        elif self.policy == "least-loaded":
            chosen, reason, blocks = loads.next(loads.least(loads.takers)[1]), "least", 0
        else:
            chosen, reason, blocks = loads.next(loads.takers), "turn", 0
        loads.turn(chosen)
        if len(loads) == 1:
            reason = "only"
        return Routing(self._table.name_of(chosen), reason, blocks * self._block_tokens)

    def _by_prefix(self, token_ids: Sequence[int], root: Hashable) -> tuple[int, Reason, int]:
        """Return the chosen member, the reason, and how many blocks of the prompt it has."""
        loads, table = self._loads, self._table
        chain = chain_of(token_ids, root, self._block_tokens)
        # Members by the number of its first blocks that they have, 0 or more; the longest last.
        groups = [(loads.takers, 0)]
        groups += [(who & loads.takers, n) for who, n in table.matches(chain) if who & loads.takers]
        holders, most = groups[-1]
        reason: Reason = "least"
        if not most:
            chosen = loads.next(loads.least(loads.takers)[1])
        else:
            home, sent = table.last_sent(chain[most - 1], holders)
            is_hot = self._turn - sent <= len(loads)
            weight = _HOT_WEIGHT if is_hot else _CALM_WEIGHT
            # Other copies of a prefix that is not hot are left to age.
            counted = groups if is_hot else [*groups[:-1], (home, most)]
            chosen = loads.next(self._best(counted, len(token_ids), weight))
            if not is_hot and chosen != home:
                chosen = loads.next(self._best(groups, len(token_ids), weight))
            reason = "prefix" if chosen & holders else "spill"
        table.add(table.name_of(chosen), chain, self._turn)
        return chosen, reason, next(n for who, n in reversed(groups) if chosen & who)

    def _best(self, groups: Iterable[tuple[int, int]], num_tokens: int, weight: float) -> int:
        """The members of the best score. Of those that have as much, these have the least load."""
        loads = self._loads
        per_block = self._block_tokens / num_tokens
        per_request = weight / max(1.0, loads.total / len(loads))
        best, chosen = (float("-inf"), 0.0), 0
        for who, blocks in groups:
            load, least = loads.least(who)
            score = (blocks * per_block - load * per_request, -load)
            if score > best:
                best, chosen = score, least
            elif score == best:
                chosen |= least
        return chosen
