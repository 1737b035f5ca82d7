"""What a fixed pool holds, against systems that reserve, and how many requests fit into it.

``waste`` is figure 2 of PagedAttention, whose variants of Orca are the baselines; ``batch`` is
figure 12 of vAttention's preprint. The pool's size is in tokens, the same for every model. Both
replay traces; the rules and the parts of memory are in benchmarks/alloc/README.md. A request of
``i`` tokens in and ``o`` out fills i + o - 1 positions (its last token is never written) and runs
for ``o`` steps.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from vmserve import _core
from vmserve_bench.alloc.pool import (
    BLOCK_TOKENS,
    Views,
    growths,
    open_pool,
    open_sequences,
    view_of,
)
from vmserve_bench.lab.table import SectionResult, table_of
from vmserve_bench.simulation.baselines import reserved_tokens
from vmserve_bench.simulation.buddy import Buddy
from vmserve_bench.workloads.shapes import alpaca, sharegpt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from vmserve_bench.alloc.section import Options
    from vmserve_bench.lab.report import Report
    from vmserve_bench.workloads.shapes import RequestShape

__all__ = ["CorePool", "ReservingPool", "largest_batch", "replay", "reservation", "run"]
__all__ += ["run_batch"]

Baseline = Literal["max", "pow2", "oracle", "oracle, any place"]
#: Tokens of the longest request, which the worst baseline reserves.
CONTEXT_TOKENS = 2048
PARTS = ("states", "reserved", "unused", "split", "free")
#: Share of the positions that admission leaves to running requests, as the paper's system does.
WATERMARK = 0.01
#: Views and tokens of a page; blocks of the paged view have 16.
_Cores = list[tuple[Views, int]]
_PAGED: _Cores = [("paged", 16), ("paged", 256)]
_CORES: _Cores = [*(("virtual", n) for n in (16, 64, 256)), *_PAGED, ("mixed", 256)]
_BATCH_CORES: _Cores = [*(("virtual", n) for n in (16, 64, 128, 256, 512, 1024, 2048)), *_PAGED]
#: Percent of KV memory that holds token states in existing systems, from the worst (Orca, Max) to
#: the best (Orca, Oracle), and with PagedAttention: more than (its figure 2).
_EXISTING_PERCENT, _PAGED_ATTENTION_PERCENT = (20.4, 38.2), 96.0
#: K and V of one token in OPT-13B, by arithmetic: 2 x 40 layers x 5,120 x 2 bytes.
_OPT_13B_TOKEN_BYTES = 2 * 40 * 5120 * 2
_PAPER = (
    f"PagedAttention's paper: existing systems hold states in {_EXISTING_PERCENT[0]} to "
    f"{_EXISTING_PERCENT[1]} %, it in more than {_PAGED_ATTENTION_PERCENT:g} %; on ShareGPT it "
    "runs 2.2 times as many requests at once as the oracle, and 4.3 times as many as max."
)


class Live:
    """A request: ``length`` positions are written, ``final`` will be, it has ``taken`` so many.

    ``place``: its sequence in the core, or where its reservation begins.
    """

    def __init__(self, shape: RequestShape) -> None:
        self.shape = shape
        # The step that admits it writes its prompt, and what it had before it was preempted.
        self.length = shape.num_input_tokens - 1
        self.final = shape.num_input_tokens + shape.num_output_tokens - 1
        self.place, self.taken = -1, 0


def reservation(baseline: Baseline, shape: RequestShape) -> int:
    """Positions that the paper's variants of Orca reserve for a request when it starts."""
    lengths = (shape.num_input_tokens, shape.num_output_tokens)
    if baseline == "max" or baseline == "pow2":
        return reserved_tokens(baseline, *lengths, CONTEXT_TOKENS)
    return sum(lengths) - 1


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
        while waiting:
            count = reservation(self._baseline, waiting[0].shape)
            found = (0, count) if self._buddy is None else self._buddy.allocate(count)
            if found is None or found[1] > self._left:
                return
            running.append(waiting.popleft())
            running[-1].place, running[-1].taken = found
            self._left -= found[1]

    def release(self, request: Live) -> None:
        self._left += request.taken
        if self._buddy is not None:
            self._buddy.free(request.place, request.taken)

    def split(self, _: int) -> int:
        return 0

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

    def step(self, running: list[Live], waiting: deque[Live]) -> None:
        """The last of ``running`` are preempted, or the queue's first admitted; all have room."""
        admits = True
        while not (plan := self.plan(running)).fits:
            admits = False
            waiting.appendleft(running.pop())
            self.release(waiting[0])
            self.num_preemptions += 1
        left = self.num_positions - sum(map(self._next_taken, running))
        while waiting and admits:
            request = waiting[0]
            self.open(request)
            trial = self.plan([*running, request])
            left -= self._next_taken(request)
            if not trial.fits or (running and left < WATERMARK * self.num_positions):
                self.release(request)
                plan = self.plan(running)
                break
            plan = trial
            running.append(waiting.popleft())
        self.apply(running, plan)

    def open(self, request: Live) -> None:
        view = view_of(self._views, request.shape.index)
        [request.place] = open_sequences(self.memory, [view])

    def plan(self, requests: Sequence[Live]) -> _core.Plan:
        """Plan another position for each."""
        return self.memory.plan_step(self._rows(requests))

    def apply(self, requests: Sequence[Live], plan: _core.Plan) -> None:
        self.memory.complete(self.memory.apply_step(self._rows(requests), plan.version))
        for request in requests:
            request.taken = self._next_taken(request)

    def _rows(self, requests: Sequence[Live]) -> NDArray[np.int64]:
        return growths([each.place for each in requests], [each.length + 1 for each in requests])

    def _next_taken(self, request: Live) -> int:
        """Positions taken with another one: whole pages in the virtual view, else blocks."""
        virtual = view_of(self._views, request.shape.index) == _core.View.VIRTUAL
        unit = self._page_tokens if virtual else BLOCK_TOKENS
        return -(-(request.length + 1) // unit) * unit

    def release(self, request: Live) -> None:
        self.memory.release(request.place)

    def split(self, taken: int) -> int:
        """Positions of free blocks in pages that are partly in use."""
        stats = self.memory.stats()
        in_use = stats.used_blocks * stats.block_tokens
        if taken != in_use:
            raise AssertionError(f"{taken} positions are the requests', the core says {in_use}")
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
            for request in running:
                positions["states"] += request.length
                positions["reserved"] += min(request.taken, request.final) - request.length
                positions["unused"] += max(0, request.taken - request.final)
            total = sum(request.taken for request in running)
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
    states, unwritten = positions["states"], positions["reserved"] + positions["unused"]
    return {
        "num_steps": num_steps,
        "num_saturated_steps": len(batches),
        "num_preemptions": pool.num_preemptions,
        "mean_batch": sum(batches) / len(batches),
        "max_batch": max(batches),
        "percent": percent,
        "states_percent_of_pool": percent["states"],
        "states_percent_of_allocated": 100 * states / (states + unwritten),
        "wasted_positions_per_request": unwritten / sum(batches),
    }


def run(options: Options, report: Report) -> SectionResult:
    """Replay both traces in every system."""
    long, short = (30, 120) if options.quick else (300, 2000)
    traces = {"sharegpt": sharegpt(long, options.seed), "alpaca": alpaca(short, options.seed)}
    systems: dict[str, Callable[[int], ReservingPool | CorePool]] = {
        f"reserve: {baseline}": partial(ReservingPool, baseline) for baseline in get_args(Baseline)
    }
    for views, page_tokens in _CORES:
        systems[f"{views}, pages of {page_tokens}"] = partial(CorePool, views, page_tokens)
    pool_tokens = 4096 if options.quick else 16384
    found: dict[str, Any] = {}
    tables = []
    for trace, shapes in traces.items():
        rows: list[dict[str, Any]] = []
        for name, make in systems.items():
            ours = {"system": name, "ours": not name.startswith("reserve")}
            rows.append({**ours, **replay(make(pool_tokens), shapes)})
            report((len(found) + len(rows) / len(systems)) / len(traces))
        found[trace] = {"num_requests": len(shapes), "systems": rows}
        columns = ("system", "percent", "states_percent_of_allocated", "mean_batch")
        title = f"{trace}: what {pool_tokens:,} positions hold while requests wait"
        tables.append(table_of(title, rows, (*columns, "num_preemptions"), _PAPER))
    data = {
        "pool_tokens": pool_tokens,
        "pool_bytes_of_opt_13b": pool_tokens * _OPT_13B_TOKEN_BYTES,
        "paper_existing_percent": list(_EXISTING_PERCENT),
        "paper_paged_attention_percent_above": _PAGED_ATTENTION_PERCENT,
        "traces": found,
    }
    return SectionResult(data, tuple(tables))


def largest_batch(
    views: Views, page_tokens: int, pool_tokens: int, shapes: Sequence[RequestShape]
) -> int:
    """Count the requests of full length that fit at once; ValueError if all do."""
    pool = CorePool(views, page_tokens, pool_tokens)
    for count, request in enumerate(map(Live, shapes)):
        request.length = request.final - 1
        pool.open(request)
        plan = pool.plan([request])
        if not plan.fits:
            pool.close()
            return count
        pool.apply([request], plan)
    raise ValueError(f"{len(shapes)} requests do not fill the pool: give more of them")


def run_batch(options: Options, report: Report) -> SectionResult:
    """Measure batches and waste by page size; compute vAttention's block-size table."""
    num_requests, shuffles = (30, 3) if options.quick else (300, 21)
    variants = _BATCH_CORES[1::3] if options.quick else _BATCH_CORES
    pool_tokens = 4096 if options.quick else 16384
    shapes = sharegpt(num_requests, options.seed)
    rows: list[dict[str, Any]] = []
    for views, page_tokens in variants:
        rng = np.random.default_rng(options.seed)
        batches = []
        for _ in range(shuffles):
            order = rng.permutation(num_requests).tolist()
            shuffled = [shapes[index] for index in order]
            batches.append(largest_batch(views, page_tokens, pool_tokens, shuffled))
        whole = {"median": float(np.median(batches)), "low": min(batches), "high": max(batches)}
        rows.append(
            {
                "view": views,
                "page_tokens": page_tokens,
                "whole_requests": whole,
                "replay": replay(CorePool(views, page_tokens, pool_tokens), shapes),
            }
        )
        report(len(rows) / len(variants))
    columns = ("view", "page_tokens", "whole_requests", "replay/mean_batch", "replay/max_batch")
    table = table_of(
        f"batches of ShareGPT-shaped requests in a pool of {pool_tokens:,} tokens",
        rows,
        (*columns, "replay/wasted_positions_per_request", "replay/num_preemptions"),
        "Quoted from vAttention's paper (A100, other requests): largest batches 187/203/56 "
        "with pages of 2 MiB, 240/258/68 with 64 KiB, of its three models.",
    )
    data = {"pool_tokens": pool_tokens, "num_requests": num_requests, "shuffles": shuffles}
    return SectionResult({**data, "variants": rows}, (table,))
