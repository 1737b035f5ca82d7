"""Regret of leaving the choice of the regime to the engine.

The regret of ``auto`` is its time over that of the better of ``virtual`` and ``paged``, less 1.
Which of the two is better is not known, only measured: so ``auto`` must be shown to be within the
limit of both. The upper end of the interval is the larger of the two upper ends (an
intersection-union test: no correction needed), the lower end the larger of two lower ends that
are corrected for being two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vmserve_bench.lab.statistics import paired_effects

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["LIMIT", "Regret", "regret"]

#: Bound of the regret: PASS excludes a larger one.
LIMIT = 0.05
CONFIDENCE = 0.95
_CORRECTED = 1.0 - (1.0 - CONFIDENCE) / 2.0


@dataclass(frozen=True, slots=True)
class Regret:
    """Shares: 0.03 is 3 % more time than the better one. ``low`` and ``high``: 95 %, None with
    too few rounds.
    """

    better: str
    value: float
    low: float | None
    high: float | None
    num_pairs: int

    @property
    def outcome(self) -> Literal["PASS", "FAIL", "not shown"]:
        """PASS where a regret above :data:`LIMIT` is excluded, FAIL where one below it is."""
        if self.low is None or self.high is None:
            return "not shown"
        if self.high <= LIMIT:
            return "PASS"
        return "FAIL" if self.low > LIMIT else "not shown"

    def to_dict(self) -> dict[str, Any]:
        return {
            "better": self.better,
            "regret": self.value,
            "low": self.low,
            "high": None if self.high == math.inf else self.high,
            "num_pairs": self.num_pairs,
            "outcome": self.outcome,
        }


def regret(auto: Sequence[float], fixed: Mapping[str, Sequence[float]], *, seed: int = 0) -> Regret:
    """Compute the regret from paired times of each round, all above 0."""
    logs = np.stack([np.log(auto) - np.log(times) for times in fixed.values()])
    upper = paired_effects(logs, seed=seed, confidence=CONFIDENCE)
    lower = paired_effects(logs, seed=seed, confidence=_CORRECTED)
    ratio, better = max((one.ratio, name) for one, name in zip(upper, fixed, strict=True))
    highs = [one.high - 1.0 for one in upper if one.high is not None]
    lows = [one.low - 1.0 for one in lower if one.low is not None]
    return Regret(better, ratio - 1.0, max(lows, default=None), max(highs, default=None), len(auto))
