"""Latencies of the last minute."""

from __future__ import annotations

import math
import statistics
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

from vmserve.types import RequestMetrics

__all__ = ["WINDOW_SECONDS", "RecentLatencies"]

WINDOW_SECONDS: Final = 60.0
_MAX_OBSERVATIONS: Final = 4096
#: Numbers of an observation: its time, seconds to the first token and between tokens.
_COLUMNS: Final = 3


class RecentLatencies:
    """Times of the requests that ended in the last minute; not for several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: Observations, oldest first; NaN for missing numbers. They are packed: objects made among
        #: those of requests would keep the memory of these.
        self._seen = array("d")

    def observe(self, times: RequestMetrics, num_tokens: int) -> None:
        """Record a request that ended with ``num_tokens`` in each choice."""
        first, last = times.first_token_time, times.last_token_time
        ttft = math.nan if first is None else first - times.arrival_time
        gap = math.nan
        if first is not None and last is not None and num_tokens > 1:
            gap = (last - first) / (num_tokens - 1)
        self._seen.extend((self._clock(), ttft, gap))
        self._forget()  # nobody may ever look

    def summary(self) -> dict[str, float | None]:
        """Return the 50th, 95th and 99th percentiles in seconds; None without requests."""
        self._forget()
        ttfts = [ttft for ttft in self._seen[1::_COLUMNS] if not math.isnan(ttft)]
        gaps = [gap for gap in self._seen[2::_COLUMNS] if not math.isnan(gap)]
        return {
            "window_seconds": WINDOW_SECONDS,
            "num_requests": len(self._seen) // _COLUMNS,
            **{f"ttft_p{percent}": _percentile(ttfts, percent) for percent in (50, 95, 99)},
            **{f"itl_p{percent}": _percentile(gaps, percent) for percent in (50, 95, 99)},
        }

    def _forget(self) -> None:
        oldest = self._clock() - WINDOW_SECONDS
        times = self._seen[::_COLUMNS]
        old = max(bisect_left(times, oldest), len(times) - _MAX_OBSERVATIONS)
        del self._seen[: _COLUMNS * old]


def _percentile(values: Sequence[float], percent: int) -> float | None:
    if not values:
        return None
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
