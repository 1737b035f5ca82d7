"""The largest batch of a fixed pool, and what a request wastes, by page size.

After figure 12 and table 8 of vAttention's preprint, on a trace with ShareGPT's lengths. Two
measures of the batch:

* ``whole requests``: requests of the trace at their full length, one after the other until the
  core's plan says that the next does not fit; the median over shuffles of the trace;
* ``decoding``: the mean number of running requests while others wait, in the replay of
  :mod:`vmserve_bench.alloc.replay`.

The pool's size is in tokens, so it is the same for every model; page sizes are in tokens too. What
they are in bytes is arithmetic: a page of 2 MiB is 2,048 tokens of the K of one layer of Yi-6B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vmserve.cli.planning.report import PRESETS, block_size_table
from vmserve.numbers.sizes import format_size
from vmserve_bench.alloc.pool import growths
from vmserve_bench.alloc.reference import OPT_13B_TOKEN_BYTES, VATTENTION_MAX_BATCH
from vmserve_bench.alloc.replay import CorePool, Live, Regime, replay
from vmserve_bench.alloc.section import Options
from vmserve_bench.lab.table import SectionResult, Table
from vmserve_bench.workloads.shapes import sharegpt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vmserve_bench.lab.report import Report
    from vmserve_bench.workloads.shapes import RequestShape

__all__ = ["POOL_TOKENS", "VARIANTS", "largest_batch", "run"]

POOL_TOKENS = 16384
_QUICK_POOL_TOKENS = 4096
#: View, and tokens of a page.
VARIANTS: tuple[tuple[Regime, int], ...] = (
    ("virtual", 16),
    ("virtual", 64),
    ("virtual", 128),
    ("virtual", 256),
    ("virtual", 512),
    ("virtual", 1024),
    ("virtual", 2048),
    ("paged", 16),
    ("paged", 256),
)
SHUFFLES = 21


def largest_batch(
    regime: Regime, page_tokens: int, pool_tokens: int, shapes: Sequence[RequestShape]
) -> int:
    """Count the requests of full length that fit at once; ValueError if all do."""
    pool = CorePool(regime, page_tokens, pool_tokens)
    memory = pool.memory
    for count, shape in enumerate(shapes):
        request = Live(shape)
        seq = memory.open(view=pool.view(request))
        assert seq is not None
        rows = growths([seq], [request.final])
        plan = memory.plan_step(rows)
        if not plan.fits:
            pool.close()
            return count
        memory.complete(memory.apply_step(rows, plan.version))
    raise ValueError(f"{len(shapes)} requests do not fill the pool: give more of them")


def run(options: Options, report: Report) -> SectionResult:
    """Measure batches and waste by page size; compute vAttention's block-size table."""
    num_requests, shuffles = (30, 3) if options.quick else (300, SHUFFLES)
    pool_tokens = _QUICK_POOL_TOKENS if options.quick else POOL_TOKENS
    variants = VARIANTS[1::3] if options.quick else VARIANTS
    shapes = sharegpt(num_requests, options.seed)
    rows = []
    for index, (regime, page_tokens) in enumerate(variants):
        rows.append(_measure(regime, page_tokens, pool_tokens, shapes, shuffles, options.seed))
        report((index + 1) / len(variants))
    data = {
        "pool_tokens": pool_tokens,
        "num_requests": num_requests,
        "shuffles": shuffles,
        "variants": rows,
        "worst_case_waste": [
            {
                "model": row.model,
                "tensor_parallel": row.tensor_parallel,
                "page_bytes": row.page_bytes,
                "tokens_per_page": row.tokens_per_page,
                "worst_case_waste_bytes": row.worst_case_waste_bytes,
            }
            for row in block_size_table([PRESETS[name] for name in _MODELS])
        ],
    }
    return SectionResult(data, (_batch_table(rows, pool_tokens), _worst_case_table()))


_MODELS = ("yi-6b", "llama-3-8b", "yi-34b")


def _measure(
    regime: Regime,
    page_tokens: int,
    pool_tokens: int,
    shapes: list[RequestShape],
    shuffles: int,
    seed: int,
) -> dict[str, Any]:
    pool = CorePool(regime, page_tokens, pool_tokens)
    result = replay(pool, shapes)
    pool.close()
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(shuffles):
        order = rng.permutation(len(shapes)).tolist()
        shuffled = [shapes[index] for index in order]
        batches.append(largest_batch(regime, page_tokens, pool_tokens, shuffled))
    return {
        "view": regime,
        "page_tokens": page_tokens,
        "whole_requests": {
            "median": float(np.median(batches)),
            "low": min(batches),
            "high": max(batches),
        },
        "replay": result.to_dict(),
    }


def _batch_table(rows: list[dict[str, Any]], pool_tokens: int) -> Table:
    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        whole, result = row["whole_requests"], row["replay"]
        wasted = result["wasted_positions_per_request"]
        return (
            f"{row['view']}, {row['page_tokens']}",
            f"{whole['median']:g} ({whole['low']} to {whole['high']})",
            f"{result['mean_batch']:.1f}",
            f"{result['max_batch']}",
            f"{wasted:.1f}",
            format_size(wasted * OPT_13B_TOKEN_BYTES),
            f"{result['states_percent_of_pool']:.1f}",
            f"{result['num_preemptions']}",
        )

    small, large = (VATTENTION_MAX_BATCH[size] for size in (64 << 10, 2 << 20))
    return Table(
        f"batches of ShareGPT-shaped requests in a pool of {pool_tokens:,} tokens",
        (
            "view, tokens a page",
            "whole requests",
            "decoding, mean",
            "most",
            "allocated, not written: tokens a request",
            "of OPT-13B",
            "token states, % of the pool",
            "preempted",
        ),
        tuple(cells(row) for row in rows),
        "The paged view has blocks of 16 tokens. Quoted from vAttention's paper (A100, other "
        f"requests): largest batches {_slashed(large)} with pages of 2 MiB, {_slashed(small)} with "
        "64 KiB, of its three models.",
    )


def _worst_case_table() -> Table:
    rows = block_size_table([PRESETS[name] for name in _MODELS])
    sizes = sorted({row.page_bytes for row in rows})
    cells: dict[str, list[str]] = {}
    for row in rows:
        name = f"{row.model}, TP-{row.tensor_parallel}"
        waste = format_size(row.worst_case_waste_bytes)
        cells.setdefault(name, []).append(f"{row.tokens_per_page:,} / {waste}")
    return Table(
        "by arithmetic: tokens a page / most that one request can waste (vAttention, table 8)",
        ("model", *(format_size(size) for size in sizes)),
        tuple((name, *line) for name, line in cells.items()),
    )


def _slashed(numbers: tuple[int, ...]) -> str:
    return "/".join(str(number) for number in numbers)
