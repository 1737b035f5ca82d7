"""The engine's memory, queues and requests at one moment, for the live views.

Plain data, so that it can cross a process boundary as it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vmserve.memory.manager import MemoryManager
    from vmserve.scheduler.sequence import Request

__all__ = [
    "MAX_CELLS",
    "PAGE_MAPPED",
    "PAGE_SHARED",
    "PAGE_USES",
    "EngineSnapshot",
    "PoolMap",
    "RequestSnapshot",
    "take_snapshot",
]

#: Most cells of the memory map; larger pools have several pages in each.
MAX_CELLS = 16_384
#: Most requests that are listed.
MAX_REQUESTS = 512
#: Uses by the low four bits of a page's code; the core's ``PageUse``.
PAGE_USES = (
    "absent",
    "free",
    "virtual",
    "paged",
    "both",
    "cached",
    "parked",
    "spare",
    "waiting",
    "held",
)
#: Bits of a page's code: a block of it has several references; a slot shows it.
PAGE_SHARED = 16
PAGE_MAPPED = 32


@dataclass(frozen=True, slots=True)
class PoolMap:
    """``cells``: a code for every ``pages_per_cell`` pages, the one that most of them have.

    ``codes``: pages by code. ``slots``: for each slot the pages that it shows, and how many of
    them its sequence has (0 in a parked slot).
    """

    num_pages: int
    pages_per_cell: int
    cells: bytes
    codes: dict[int, int]
    slots: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class RequestSnapshot:
    """A request that has not ended. Times are in seconds; None where not reached."""

    request_id: str
    #: Account of the request.
    tenant: str
    #: "running", "waiting" or "swapped".
    state: str
    regime: str
    #: Reason of this regime, and what was predicted: see :class:`vmserve.types.RequestMetrics`.
    reason: str
    costs: dict[str, float]
    slots: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_branches: int
    num_preemptions: int
    priority: int
    age_seconds: float
    queue_seconds: float | None
    ttft_seconds: float | None
    itl_seconds: float | None


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """``stats``: as :meth:`vmserve.engine.engine.LLMEngine.stats` has them, of the same moment.

    ``requests``: those that run, then those that wait, in the order in which they are served.
    """

    stats: dict[str, float | int]
    pool: PoolMap
    requests: list[RequestSnapshot]
    num_requests: int


def take_snapshot(
    stats: dict[str, float | int],
    memory: MemoryManager,
    requests: Iterable[Request],
) -> EngineSnapshot:
    """Take a snapshot in the engine's thread: it costs the pool's pages and a row per request."""
    rows = list(requests)
    now = time.monotonic()
    shown = sorted(rows, key=_served_first)[:MAX_REQUESTS]
    slots = _slots_by_request(memory, shown)
    return EngineSnapshot(
        stats=stats,
        pool=_pool_map(memory),
        requests=[_row(request, slots[index], now) for index, request in enumerate(shown)],
        num_requests=len(rows),
    )


def _served_first(request: Request) -> tuple[bool, int, int]:
    return (_state(request) != "running", request.rank, request.arrival)


def _state(request: Request) -> str:
    states = {sequence.status.value for sequence in request.sequences}
    return next((state for state in ("running", "swapped") if state in states), "waiting")


def _slots_by_request(memory: MemoryManager, requests: list[Request]) -> list[list[int]]:
    owners: list[int] = []
    memory_ids: list[int] = []
    for index, request in enumerate(requests):
        for sequence in request.sequences:
            if sequence.memory_id is not None:
                owners.append(index)
                memory_ids.append(sequence.memory_id)
    slots: list[list[int]] = [[] for _ in requests]
    found = memory.slots(np.array(memory_ids, dtype=np.int64)).tolist()
    for index, slot in zip(owners, found, strict=True):
        if slot >= 0:
            slots[index].append(slot)
    return slots


def _pool_map(memory: MemoryManager) -> PoolMap:
    num_pages, pages_per_cell, cells, counts, slots = memory.memory_map(MAX_CELLS)
    return PoolMap(
        num_pages=num_pages,
        pages_per_cell=pages_per_cell,
        cells=cells,
        codes={code: count for code, count in enumerate(counts) if count},
        slots=[(mapped, used) for _, mapped, used in slots.tolist()],
    )


def _row(request: Request, slots: list[int], now: float) -> RequestSnapshot:
    metrics = request.metrics
    arrival, first, last = metrics.arrival_time, metrics.first_token_time, metrics.last_token_time
    scheduled = metrics.first_scheduled_time
    longest = max((sequence.num_output for sequence in request.sequences), default=0)
    gap = None
    if first is not None and last is not None and longest > 1:
        gap = (last - first) / (longest - 1)
    return RequestSnapshot(
        request_id=request.request_id,
        tenant=request.tenant,
        state=_state(request),
        regime=metrics.kv_regime if request.regime is not None else "",
        reason=metrics.kv_regime_reason,
        costs=dict(metrics.kv_regime_costs),
        slots=slots,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=metrics.num_cached_tokens,
        num_computed_tokens=max((seq.num_computed for seq in request.sequences), default=0),
        num_output_tokens=sum(sequence.num_output for sequence in request.sequences),
        max_tokens=request.max_tokens,
        num_branches=request.num_branches,
        num_preemptions=metrics.num_preemptions,
        priority=request.priority,
        age_seconds=now - arrival,
        queue_seconds=None if scheduled is None else scheduled - arrival,
        ttft_seconds=None if first is None else first - arrival,
        itl_seconds=gap,
    )
