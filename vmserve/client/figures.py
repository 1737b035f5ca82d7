"""Figures and pictures of several engines as if they were one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from vmserve.telemetry.counters import merged_stats
from vmserve.telemetry.snapshot import EngineSnapshot, PoolMap

__all__ = ["merged_snapshot"]


def merged_snapshot(snapshots: Sequence[EngineSnapshot]) -> EngineSnapshot:
    """Put memories one after the other: slots of a request count those of engines before it."""
    requests = []
    num_slots = 0
    for each in snapshots:
        requests += [
            replace(request, slots=[num_slots + slot for slot in request.slots])
            for request in each.requests
        ]
        num_slots += len(each.pool.slots)
    return EngineSnapshot(
        merged_stats([each.stats for each in snapshots]),
        _merged_pool([each.pool for each in snapshots]),
        requests,
        sum(each.num_requests for each in snapshots),
    )


def _merged_pool(pools: Sequence[PoolMap]) -> PoolMap:
    codes: dict[int, int] = {}
    for pool in pools:
        for code, count in pool.codes.items():
            codes[code] = codes.get(code, 0) + count
    return PoolMap(
        sum(pool.num_pages for pool in pools),
        # Engines of one size have the same; of others only the scale of the map is coarser.
        max((pool.pages_per_cell for pool in pools), default=1),
        _joined(pool.cells for pool in pools),
        codes,
        [slot for pool in pools for slot in pool.slots],
    )


def _joined(parts: Iterable[bytes]) -> bytes:
    return b"".join(parts)
