"""What a fixed pool holds, against systems that reserve, and how many requests fit into it.

``waste`` is figure 2 of PagedAttention, whose variants of Orca are the baselines; ``batch`` is
figure 12 of vAttention's preprint. The pool's size is in tokens, the same for every model.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from vmserve_bench.alloc.replay import Baseline, CorePool, Live, ReservingPool, replay
from vmserve_bench.alloc.section import Options, rows_table
from vmserve_bench.lab.table import SectionResult
from vmserve_bench.workloads.shapes import alpaca, sharegpt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vmserve_bench.alloc.pool import Views
    from vmserve_bench.lab.report import Report
    from vmserve_bench.workloads.shapes import RequestShape

__all__ = ["largest_batch", "run", "run_batch"]

#: Views and tokens of a page; blocks of the paged view have 16.
_Cores = list[tuple["Views", int]]
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
        tables.append(rows_table(title, rows, (*columns, "num_preemptions"), _PAPER))
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
    table = rows_table(
        f"batches of ShareGPT-shaped requests in a pool of {pool_tokens:,} tokens",
        rows,
        (*columns, "replay/wasted_positions_per_request", "replay/num_preemptions"),
        "Quoted from vAttention's paper (A100, other requests): largest batches 187/203/56 "
        "with pages of 2 MiB, 240/258/68 with 64 KiB, of its three models.",
    )
    data = {"pool_tokens": pool_tokens, "num_requests": num_requests, "shuffles": shuffles}
    return SectionResult({**data, "variants": rows}, (table,))
