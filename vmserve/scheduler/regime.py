"""Which regime a request is kept in."""

from __future__ import annotations

from typing import Literal, NamedTuple

from vmserve.memory.base import Regime
from vmserve.scheduler.sequence import Request

__all__ = ["RegimeChoice", "RegimePolicy"]


class RegimeChoice(NamedTuple):
    regime: Regime
    reason: str


class RegimePolicy:
    """``virtual`` and ``paged`` are what they say; ``auto`` goes by what is shared.

    A fork costs the virtual view a map call for each shared page and a copy of the last one,
    the paged view a list and, later, the copy of a block: requests that fork are paged.
    """

    def __init__(self, regime: Literal["auto", "virtual", "paged"]) -> None:
        self._forced = None if regime == "auto" else Regime(regime)

    def choose(self, request: Request) -> RegimeChoice:
        if self._forced is not None:
            return RegimeChoice(self._forced, "forced")
        if request.num_branches > 1:
            return RegimeChoice(Regime.PAGED, "forks")
        return RegimeChoice(Regime.VIRTUAL, "alone")
