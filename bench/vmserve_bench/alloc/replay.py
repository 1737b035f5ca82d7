"""Replay of a trace against a fixed pool: which requests fit, what the memory holds.

There is no model: a step gives every running request one token. Requests wait in order of
arrival, all there at the start, and the first is admitted when its prompt fits. Its prompt is in
memory after the step that admits it, and its last token is never written. So a request of ``i``
tokens in and ``o`` out fills i + o - 1 positions and runs for ``o`` steps. The request that came
last is preempted when a step does not fit: its memory is given up, it goes back to the head
of the queue, and what it had is written again when it returns.

Memory is counted in positions (token slots of the whole model) after every step in which requests
are waiting, that is while the pool is as full as the policy gets it:

* ``states``: hold the K and V of a live request;
* ``reserved``: belong to a live request that will write them before it ends;
* ``unused``: belong to a live request that never will;
* ``split``: free blocks of pages that are partly in use (only blocks of the paged view fit there);
* ``free``: the rest: unowned, too little, or in the wrong place for waiting requests.

They add up to the pool. ``states`` in percent of the pool is the measure of figure 2 of the
PagedAttention paper. ``states`` in percent of ``states + reserved + unused`` leaves out what the
admission leaves free.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from vmserve import _core
from vmserve_bench.alloc.pool import BLOCK_TOKENS, growths, open_pool
from vmserve_bench.simulation.buddy import Buddy, power_of_two

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vmserve_bench.workloads.shapes import RequestShape

__all__ = [
    "CONTEXT_TOKENS",
    "Baseline",
    "CorePool",
    "Live",
    "Regime",
    "Replay",
    "ReservingPool",
    "Usage",
    "replay",
    "reservation",
]

Baseline = Literal["max", "pow2", "oracle", "oracle, any place"]
Regime = Literal["virtual", "paged", "mixed"]

#: Tokens of the longest request, which the worst baseline reserves.
CONTEXT_TOKENS = 2048
PARTS = ("states", "reserved", "unused", "split", "free")
#: Share of the positions that admission leaves to running requests, as the paper's system does.
WATERMARK = 0.01
_PAGE_BYTES = 4096


@dataclass(slots=True)
class Live:
    """A request: ``length`` positions are written, ``final`` will be."""

    shape: RequestShape
    length: int = 0
    #: Sequence in the core, or start and size of the reservation.
    handle: int = -1
    chunk: int = 0

    @property
    def final(self) -> int:
        return self.shape.num_input_tokens + self.shape.num_output_tokens - 1

    @property
    def first_length(self) -> int:
        """Positions written at admission: the prompt, and tokens computed before preemption."""
        return self.length + 1 if self.length else self.shape.num_input_tokens


@dataclass(slots=True)
class Usage:
    """Positions by what they hold; sums over samples."""

    states: int = 0
    reserved: int = 0
    unused: int = 0
    split: int = 0
    free: int = 0

    def add_request(self, length: int, final: int, allocated: int) -> None:
        """A request that has ``allocated`` positions, ``length`` of them written."""
        self.states += length
        self.reserved += min(allocated, final) - length
        self.unused += max(0, allocated - final)

    @property
    def allocated(self) -> int:
        return self.states + self.reserved + self.unused

    @property
    def total(self) -> int:
        return self.allocated + self.split + self.free

    @property
    def percent_of_pool(self) -> float:
        return 100 * self.states / self.total

    @property
    def percent_of_allocated(self) -> float:
        return 100 * self.states / self.allocated

    def to_percent(self) -> dict[str, float]:
        """Each part in percent of the pool."""
        return {part: 100 * getattr(self, part) / self.total for part in PARTS}


class Pool(Protocol):
    """Source of the requests' memory."""

    num_positions: int

    def advance(self, running: list[Live], waiting: deque[Live]) -> list[Live]:
        """One step: admits from the queue's head, preempts from ``running``'s end onto it, and
        writes a token (a prompt, for the admitted). Returns those that run now."""
        ...

    def release(self, request: Live) -> None: ...

    def count(self, running: Sequence[Live], usage: Usage) -> None:
        """Add this moment to ``usage``."""
        ...


def reservation(baseline: Baseline, shape: RequestShape) -> int:
    """Positions that the paper's variants of Orca reserve for a request when it starts.

    Max: the longest request there can be. Pow2: room for the next power of two of its output,
    known to that precision. Oracle: exactly what it will write.
    """
    if baseline == "max":
        return CONTEXT_TOKENS
    if baseline == "pow2":
        rounded = power_of_two(shape.num_output_tokens)
        return min(CONTEXT_TOKENS, shape.num_input_tokens + rounded)
    return shape.num_input_tokens + shape.num_output_tokens - 1


class ReservingPool:
    """Contiguous memory for the whole request, taken when it starts.

    A buddy allocator places it, as in the paper; for ``oracle, any place`` only the sum counts:
    no allocator that reserves can do better.
    """

    def __init__(self, baseline: Baseline, num_positions: int) -> None:
        self.num_positions = num_positions
        self._baseline = baseline
        self._buddy = None if baseline == "oracle, any place" else Buddy(num_positions)
        self._taken = 0

    def advance(self, running: list[Live], waiting: deque[Live]) -> list[Live]:
        for request in running:
            request.length += 1
        while waiting and self._admit(waiting[0]):
            request = waiting.popleft()
            request.length = request.first_length
            running.append(request)
        return running

    def _admit(self, request: Live) -> bool:
        count = reservation(self._baseline, request.shape)
        if self._buddy is None:
            if self._taken + count > self.num_positions:
                return False
            request.chunk = count
        else:
            place = self._buddy.allocate(count)
            if place is None:
                return False
            request.handle, request.chunk = place
        self._taken += request.chunk
        return True

    def release(self, request: Live) -> None:
        self._taken -= request.chunk
        if self._buddy is not None:
            self._buddy.free(request.handle, request.chunk)

    def count(self, running: Sequence[Live], usage: Usage) -> None:
        for request in running:
            usage.add_request(request.length, request.final, request.chunk)
        usage.free += self.num_positions - self._taken


class CorePool:
    """The memory core itself, with pages of 4 KiB whatever they hold: only tokens are counted.

    ``mixed``: every other request is paged.
    """

    def __init__(
        self, regime: Regime, page_tokens: int, num_positions: int, max_seqs: int = 1024
    ) -> None:
        self.num_positions = num_positions
        self._regime = regime
        self._page_tokens = page_tokens
        num_pages = num_positions // page_tokens
        self.num_preemptions = 0
        self.memory = open_pool(
            page_tokens=page_tokens,
            token_bytes=_PAGE_BYTES // page_tokens,
            max_pages=num_pages,
            grow_pages=num_pages,
            max_seqs=max_seqs,
            max_len=CONTEXT_TOKENS,
            prefix_caching=False,
        )

    def view(self, request: Live) -> _core.View:
        paged = self._regime == "paged" or (self._regime == "mixed" and request.shape.index % 2)
        return _core.View.PAGED if paged else _core.View.VIRTUAL

    def advance(self, running: list[Live], waiting: deque[Live]) -> list[Live]:
        memory = self.memory
        lengths = [request.length + 1 for request in running]
        plan = self._plan(running, lengths)
        preempted = False
        while not plan.fits:
            victim = running.pop()
            lengths.pop()
            waiting.appendleft(victim)
            self.release(victim)
            self.num_preemptions += 1
            preempted = True
            plan = self._plan(running, lengths)
        left = self.num_positions - sum(map(self.allocated, running, lengths))
        while waiting and not preempted:
            request = waiting[0]
            seq = memory.open(view=self.view(request))
            if seq is None:
                break
            request.handle = seq
            with_it = self._plan([*running, request], [*lengths, request.first_length])
            left -= self.allocated(request, request.first_length)
            if not with_it.fits or (running and left < WATERMARK * self.num_positions):
                memory.release(seq)
                plan = self._plan(running, lengths)
                break
            plan = with_it
            running.append(waiting.popleft())
            lengths.append(request.first_length)
        rows = growths([request.handle for request in running], lengths)
        memory.complete(memory.apply_step(rows, plan.version))
        for request, length in zip(running, lengths, strict=True):
            request.length = length
        return running

    def _plan(self, running: Sequence[Live], lengths: Sequence[int]) -> _core.Plan:
        return self.memory.plan_step(growths([request.handle for request in running], lengths))

    def release(self, request: Live) -> None:
        self.memory.release(request.handle)

    def allocated(self, request: Live, length: int) -> int:
        """Positions of the request: whole pages in the virtual view, else blocks."""
        virtual = self.view(request) == _core.View.VIRTUAL
        unit = self._page_tokens if virtual else BLOCK_TOKENS
        return -(-length // unit) * unit

    def count(self, running: Sequence[Live], usage: Usage) -> None:
        allocated = 0
        for request in running:
            positions = self.allocated(request, request.length)
            usage.add_request(request.length, request.final, positions)
            allocated += positions
        stats = self.memory.stats()
        in_use = stats.used_blocks * stats.block_tokens
        if allocated != in_use:
            raise AssertionError(f"{allocated} positions are the requests', the core says {in_use}")
        usage.split += stats.used_pages * self._page_tokens - in_use
        usage.free += self.num_positions - stats.used_pages * self._page_tokens

    def close(self) -> None:
        self.memory.check()
        self.memory.close()


@dataclass(slots=True)
class Replay:
    """Result of a replay. ``batch``: running requests of saturated steps."""

    num_steps: int = 0
    num_saturated_steps: int = 0
    num_preemptions: int = 0
    batches: list[int] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)

    @property
    def mean_batch(self) -> float:
        return sum(self.batches) / len(self.batches)

    @property
    def wasted_per_request(self) -> float:
        """Positions that a running request has and never writes or has not written yet."""
        return (self.usage.reserved + self.usage.unused) / sum(self.batches)

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_steps": self.num_steps,
            "num_saturated_steps": self.num_saturated_steps,
            "num_preemptions": self.num_preemptions,
            "mean_batch": self.mean_batch,
            "max_batch": max(self.batches),
            "percent": self.usage.to_percent(),
            "states_percent_of_pool": self.usage.percent_of_pool,
            "states_percent_of_allocated": self.usage.percent_of_allocated,
            "wasted_positions_per_request": self.wasted_per_request,
        }


def replay(pool: Pool, shapes: Sequence[RequestShape]) -> Replay:
    """Run the trace to its end. Raises ValueError if no request ever waited."""
    result = Replay()
    waiting = deque(Live(shape) for shape in shapes)
    running: list[Live] = []
    while waiting or running:
        running = pool.advance(running, waiting)
        result.num_steps += 1
        if waiting:
            result.num_saturated_steps += 1
            result.batches.append(len(running))
            pool.count(running, result.usage)
        for request in running:
            if request.length >= request.final:
                pool.release(request)
        running = [request for request in running if request.length < request.final]
    if not result.num_saturated_steps:
        raise ValueError(f"{len(shapes)} requests do not fill the pool: replay more of them")
    result.num_preemptions = getattr(pool, "num_preemptions", 0)
    return result
