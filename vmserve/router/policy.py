"""Chooses a member for each request, without clocks, threads or messages.

The caller says which members take requests now and how many each has in flight, so no count of
the router's own can drift. Policies:

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

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

__all__ = ["Choice", "Policy", "Reason", "Router"]

Policy = Literal["prefix", "least-loaded", "round-robin"]
#: "only": no other takes requests. "prefix": nobody has more of the prompt. "spill": another has
#: more of it, and too much to do. "least": nobody has any of it. "turn": round robin.
Reason = Literal["only", "prefix", "spill", "least", "turn"]

#: All members together; a block takes 200 bytes.
_MAX_BLOCKS = 1 << 22
#: Of the load, for a prefix that is hot and for others. 0.5 is the least with which a prefix leaves
#: one of two members when the other is idle.
_HOT_WEIGHT, _CALM_WEIGHT = 1.0, 0.6


class Choice(NamedTuple):
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
        self._turn = 0
        #: In which turn a member was last chosen; 0: never.
        self._last_turn: dict[str, int] = {}

    @property
    def members(self) -> Collection[str]:
        return self._last_turn.keys()

    @property
    def num_blocks(self) -> int:
        """Blocks that are remembered."""
        return self._table.num_blocks

    def join(self, member: str, cache_blocks: int) -> None:
        """Add a member, or one anew that has restarted. ``cache_blocks`` 0: no prefix cache.

        ``cache_blocks``: as many as its prefix cache can have.
        """
        self.leave(member)
        self._table.join(member, cache_blocks)
        self._last_turn[member] = 0

    def leave(self, member: str) -> None:
        """Forget a member. One that is unknown is ignored."""
        if self._last_turn.pop(member, None) is not None:
            self._table.leave(member)

    def forget(self, member: str) -> None:
        """Note that a member's prefix cache is empty."""
        self._table.forget(member)

    def choose(
        self, token_ids: Sequence[int], root: Hashable, loads: Mapping[str, float]
    ) -> Choice:
        """Choose who gets a request now, and expect the prompt in its cache from now on.

        ``root``: what the prefix cache separates requests by (isolation and salt). ``loads``: how
        many requests each member that takes requests has in flight; not empty.
        """
        self._turn += 1
        if self.policy == "round-robin":
            choice = Choice(self._longest_ago(loads), "turn", 0)
        elif self.policy == "least-loaded":
            choice = Choice(self._least_loaded(loads), "least", 0)
        else:
            choice = self._by_prefix(token_ids, root, loads)
        if len(loads) == 1:
            choice = choice._replace(reason="only")
        self._last_turn[choice.member] = self._turn
        return choice

    def _by_prefix(
        self, token_ids: Sequence[int], root: Hashable, loads: Mapping[str, float]
    ) -> Choice:
        chain = chain_of(token_ids, root, self._block_tokens)
        found = self._table.matches(chain)
        matches = {name: blocks for name, blocks in found.items() if name in loads}
        most = max(matches.values(), default=0)
        # Of members that have nothing, the one with the least load has the best score.
        chosen = self._least_loaded(loads)
        matches.setdefault(chosen, 0)
        if most:
            turns = {
                name: self._table.last_turn(name, chain[most - 1])
                for name, blocks in matches.items()
                if blocks == most
            }
            home = max(turns, key=turns.__getitem__)
            is_hot = self._turn - turns[home] <= len(loads)
            worth = self._worth(len(token_ids), loads, _HOT_WEIGHT if is_hot else _CALM_WEIGHT)
            # Other copies of a prefix that is not hot are left to age.
            old = () if is_hot else turns.keys() - {home}
            counted = {**matches, **dict.fromkeys(old, 0)}
            chosen = max(counted, key=lambda name: worth(name, counted[name]))
            if counted[chosen] < most:
                chosen = max(matches, key=lambda name: worth(name, matches[name]))
        reason: Reason = "least" if not most else "prefix" if matches[chosen] == most else "spill"
        self._table.add(chosen, chain, self._turn)
        return Choice(chosen, reason, matches[chosen] * self._block_tokens)

    def _worth(
        self, num_tokens: int, loads: Mapping[str, float], weight: float
    ) -> Callable[[str, int], tuple[float, float, int]]:
        per_block = self._block_tokens / num_tokens
        per_request = weight / max(1.0, sum(loads.values()) / len(loads))

        def worth(name: str, blocks: int) -> tuple[float, float, int]:
            load = loads[name]
            return blocks * per_block - load * per_request, -load, -self._last_turn[name]

        return worth

    def _least_loaded(self, loads: Mapping[str, float]) -> str:
        least = min(loads.values())
        return self._longest_ago([name for name, load in loads.items() if load == least])

    def _longest_ago(self, names: Iterable[str]) -> str:
        return min(names, key=self._last_turn.__getitem__)
