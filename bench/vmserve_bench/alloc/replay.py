"""Replay of a trace against a fixed pool: which requests fit, and what the memory holds.

The rules and the parts of memory are in benchmarks/alloc/README.md. A request of ``i`` tokens in
and ``o`` out fills i + o - 1 positions (its last token is never written) and runs for ``o`` steps.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Literal

from vmserve import _core
from vmserve_bench.alloc.pool import BLOCK_TOKENS, Views, growths, open_pool, view_of
from vmserve_bench.simulation.buddy import Buddy, power_of_two

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from vmserve_bench.workloads.shapes import RequestShape

__all__ = ["PARTS", "Baseline", "CorePool", "Live", "ReservingPool", "replay", "reservation"]

Baseline = Literal["max", "pow2", "oracle", "oracle, any place"]
#: Tokens of the longest request, which the worst baseline reserves.
CONTEXT_TOKENS = 2048
PARTS = ("states", "reserved", "unused", "split", "free")
#: Share of the positions that admission leaves to running requests, as the paper's system does.
WATERMARK = 0.01


class Live:
    """A request: ``length`` positions are written, and ``final`` will be.

    ``place``: its sequence in the core, or its reservation, of ``chunk`` positions.
    """

    def __init__(self, shape: RequestShape) -> None:
        self.shape = shape
        # The step that admits it writes its prompt, and what it had before it was preempted.
        self.length = shape.num_input_tokens - 1
        self.final = shape.num_input_tokens + shape.num_output_tokens - 1
        self.place, self.chunk = -1, 0


def reservation(baseline: Baseline, shape: RequestShape) -> int:
    """Positions that the paper's variants of Orca reserve for a request when it starts."""
    if baseline == "max":
        return CONTEXT_TOKENS
    if baseline == "pow2":
        return min(CONTEXT_TOKENS, shape.num_input_tokens + power_of_two(shape.num_output_tokens))
    return shape.num_input_tokens + shape.num_output_tokens - 1


class ReservingPool:
    """Contiguous memory for the whole request, taken when it starts from a buddy allocator.

    For ``oracle, any place`` only the sum counts: nothing that reserves can do better.
    """

    num_preemptions = 0

    def __init__(self, baseline: Baseline, num_positions: int) -> None:
        self.num_positions, self._baseline = num_positions, baseline
        self._buddy = None if baseline == "oracle, any place" else Buddy(num_positions)
        self._left = num_positions

    def step(self, running: list[Live], waiting: deque[Live]) -> None:
        while waiting and self._admit(waiting[0]):
            running.append(waiting.popleft())

    def _admit(self, request: Live) -> bool:
        count = reservation(self._baseline, request.shape)
        found = (0, count) if self._buddy is None else self._buddy.allocate(count)
        if found is None or found[1] > self._left:
            return False
        request.place, request.chunk = found
        self._left -= request.chunk
        return True

    def release(self, request: Live) -> None:
        self._left += request.chunk
        if self._buddy is not None:
            self._buddy.free(request.place, request.chunk)

    def allocated(self, request: Live) -> int:
        return request.chunk

    def split(self, allocated: int) -> int:
        return self.num_positions - self._left - allocated

    def close(self) -> None: ...


class CorePool:
    """The memory core itself, with pages of 4 KiB whatever they hold: only tokens are counted."""

    def __init__(self, views: Views, page_tokens: int, num_positions: int) -> None:
        self.num_positions, self._views, self._page_tokens = num_positions, views, page_tokens
        self.num_preemptions = 0
        self.memory = open_pool(
            page_tokens=page_tokens,
            token_bytes=4096 // page_tokens,
            max_pages=num_positions // page_tokens,
            grow_pages=num_positions // page_tokens,
            max_seqs=num_positions // BLOCK_TOKENS + 1,
            max_len=CONTEXT_TOKENS,
            prefix_caching=False,
        )

    def open(self, request: Live) -> None:
        seq = self.memory.open(view=view_of(self._views, request.shape.index))
        assert seq is not None
        request.place = seq

    def step(self, running: list[Live], waiting: deque[Live]) -> None:
        """The last of ``running`` are preempted, or the queue's first admitted; all have room."""
        plan = self.plan(running)
        admits = plan.fits
        while not plan.fits:
            waiting.appendleft(running.pop())
            self.release(waiting[0])
            self.num_preemptions += 1
            plan = self.plan(running)
        left = self.num_positions - sum(self._taken(each, each.length + 1) for each in running)
        while waiting and admits:
            request = waiting[0]
            self.open(request)
            trial = self.plan([*running, request])
            left -= self._taken(request, request.length + 1)
            if not trial.fits or (running and left < WATERMARK * self.num_positions):
                self.release(request)
                plan = self.plan(running)
                break
            plan = trial
            running.append(waiting.popleft())
        self.apply(running, plan)

    def plan(self, requests: Sequence[Live]) -> _core.Plan:
        """Plan another position for each."""
        return self.memory.plan_step(self._rows(requests))

    def apply(self, requests: Sequence[Live], plan: _core.Plan) -> None:
        self.memory.complete(self.memory.apply_step(self._rows(requests), plan.version))

    def _rows(self, requests: Sequence[Live]) -> NDArray[np.int64]:
        return growths([each.place for each in requests], [each.length + 1 for each in requests])

    def release(self, request: Live) -> None:
        self.memory.release(request.place)

    def allocated(self, request: Live) -> int:
        return self._taken(request, request.length)

    def _taken(self, request: Live, length: int) -> int:
        """Positions of the request: whole pages in the virtual view, else blocks."""
        virtual = view_of(self._views, request.shape.index) == _core.View.VIRTUAL
        unit = self._page_tokens if virtual else BLOCK_TOKENS
        return -(-length // unit) * unit

    def split(self, allocated: int) -> int:
        """Positions of free blocks in pages that are partly in use."""
        stats = self.memory.stats()
        in_use = stats.used_blocks * stats.block_tokens
        if allocated != in_use:
            raise AssertionError(f"{allocated} positions are the requests', the core says {in_use}")
        return stats.used_pages * self._page_tokens - in_use

    def close(self) -> None:
        self.memory.check()
        self.memory.close()


def replay(pool: ReservingPool | CorePool, shapes: Sequence[RequestShape]) -> dict[str, Any]:
    """Run the trace to its end. Raises ValueError if no request ever waited."""
    waiting = deque(Live(shape) for shape in shapes)
    running: list[Live] = []
    num_steps = 0
    batches: list[int] = []  # running requests of the steps in which others wait
    positions = dict.fromkeys(PARTS, 0)  # by what they hold, summed over those steps
    while waiting or running:
        pool.step(running, waiting)
        num_steps += 1
        for request in running:
            request.length += 1
        if waiting:
            batches.append(len(running))
            total = 0
            for request in running:
                allocated = pool.allocated(request)
                positions["states"] += request.length
                positions["reserved"] += min(allocated, request.final) - request.length
                positions["unused"] += max(0, allocated - request.final)
                total += allocated
            split = pool.split(total)
            positions["split"] += split
            positions["free"] += pool.num_positions - total - split
        for request in running:
            if request.length >= request.final:
                pool.release(request)
        running = [request for request in running if request.length < request.final]
    pool.close()
    if not batches:
        raise ValueError(f"{len(shapes)} requests do not fill the pool: replay more of them")
    percent = {p: 100 * n / (len(batches) * pool.num_positions) for p, n in positions.items()}
    unwritten = positions["reserved"] + positions["unused"]
    return {
        "num_steps": num_steps,
        "num_saturated_steps": len(batches),
        "num_preemptions": pool.num_preemptions,
        "mean_batch": sum(batches) / len(batches),
        "max_batch": max(batches),
        "percent": percent,
        "states_percent_of_pool": percent["states"],
        "states_percent_of_allocated": 100
        * positions["states"]
        / (positions["states"] + unwritten),
        "wasted_positions_per_request": unwritten / sum(batches),
    }
