"""Latencies of the last minute."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from vmserve.types import RequestMetrics

__all__ = ["WINDOW_SECONDS", "RecentLatencies"]

WINDOW_SECONDS: Final = 60.0
_MAX_OBSERVATIONS: Final = 4096


class RecentLatencies:
    """Times of the requests that ended in the last minute; not for several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, float | None, float | None]] = deque(
            maxlen=_MAX_OBSERVATIONS
        )

    def observe(self, times: RequestMetrics, num_tokens: int) -> None:
        """Record a request that ended with ``num_tokens`` in each choice."""
        first, last = times.first_token_time, times.last_token_time
        ttft = None if first is None else first - times.arrival_time
        gap = None
        if first is not None and last is not None and num_tokens > 1:
            gap = (last - first) / (num_tokens - 1)
        self._seen.append((self._clock(), ttft, gap))
        self._forget()  # nobody may ever look

    def summary(self) -> dict[str, float | None]:
        """Return the 50th, 95th and 99th percentiles in seconds; None without requests."""
        self._forget()
        ttfts = [ttft for _, ttft, _ in self._seen if ttft is not None]
        gaps = [gap for _, _, gap in self._seen if gap is not None]
        return {
            "window_seconds": WINDOW_SECONDS,
            "num_requests": len(self._seen),
            **{f"ttft_p{percent}": _percentile(ttfts, percent) for percent in (50, 95, 99)},
            **{f"itl_p{percent}": _percentile(gaps, percent) for percent in (50, 95, 99)},
        }

    def _forget(self) -> None:
        oldest = self._clock() - WINDOW_SECONDS
        while self._seen and self._seen[0][0] < oldest:
            self._seen.popleft()


def _percentile(values: Sequence[float], percent: int) -> float | None:
    if not values:
        return None
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
