"""How much of the KV memory holds token states, against systems that reserve (PagedAttention,
figure 2).

The replay, its five kinds of memory and its admission are those of
:mod:`vmserve_bench.alloc.replay`. The baselines are the paper's variants of Orca: contiguous
memory, placed by a buddy allocator, for the longest request there can be (``max``), for the prompt
and the next power of two of the output (``pow2``), for exactly what will be written (``oracle``);
and the oracle without an allocator's gaps (``oracle, any place``), which no reservation can beat.
Ours is the memory core: pages of the virtual view, blocks of 16 tokens of the paged view, and
every other request in either view (``mixed``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vmserve.numbers.sizes import format_size
from vmserve_bench.alloc.reference import (
    OPT_13B_TOKEN_BYTES,
    PAGED_ATTENTION_USED_PERCENT_ABOVE,
    PAPER_EXISTING_USED_PERCENT,
    PAPER_TIMES_MAX_BATCH,
    PAPER_TIMES_ORACLE_BATCH,
)
from vmserve_bench.alloc.replay import (
    PARTS,
    Baseline,
    CorePool,
    Regime,
    Replay,
    ReservingPool,
    replay,
)
from vmserve_bench.alloc.section import Options
from vmserve_bench.lab.table import SectionResult, Table
from vmserve_bench.workloads.shapes import alpaca, sharegpt

if TYPE_CHECKING:
    from vmserve_bench.lab.report import Report
    from vmserve_bench.workloads.shapes import RequestShape

__all__ = ["BASELINES", "CORES", "POOL_TOKENS", "run"]

POOL_TOKENS = 16384
_QUICK_POOL_TOKENS = 4096
BASELINES: tuple[Baseline, ...] = ("max", "pow2", "oracle", "oracle, any place")
#: View and tokens of a page; the paged view's blocks have 16 tokens.
CORES: tuple[tuple[Regime, int], ...] = (
    ("virtual", 16),
    ("virtual", 64),
    ("virtual", 256),
    ("paged", 16),
    ("paged", 256),
    ("mixed", 256),
)


def run(options: Options, report: Report) -> SectionResult:
    """Replay both traces in every system."""
    if options.quick:
        traces = {"sharegpt": sharegpt(30, options.seed), "alpaca": alpaca(120, options.seed)}
    else:
        traces = {"sharegpt": sharegpt(300, options.seed), "alpaca": alpaca(2000, options.seed)}
    pool_tokens = _QUICK_POOL_TOKENS if options.quick else POOL_TOKENS
    systems = len(BASELINES) + len(CORES)
    data: dict[str, Any] = {
        "pool_tokens": pool_tokens,
        "pool_bytes_of_opt_13b": pool_tokens * OPT_13B_TOKEN_BYTES,
        "paper_existing_percent": list(PAPER_EXISTING_USED_PERCENT),
        "paper_paged_attention_percent_above": PAGED_ATTENTION_USED_PERCENT_ABOVE,
        "traces": {},
    }
    tables = []
    for at, (trace, shapes) in enumerate(traces.items()):
        rows: list[dict[str, Any]] = []
        for system in range(systems):
            rows.append(_measure(system, pool_tokens, shapes))
            report((at * systems + system + 1) / (systems * len(traces)))
        data["traces"][trace] = {"num_requests": len(shapes), "systems": rows}
        tables.append(_table(trace, rows, pool_tokens))
    return SectionResult(data, tuple(tables))


def _measure(system: int, pool_tokens: int, shapes: list[RequestShape]) -> dict[str, Any]:
    if system < len(BASELINES):
        baseline = BASELINES[system]
        result: Replay = replay(ReservingPool(baseline, pool_tokens), shapes)
        return {"system": f"reserve: {baseline}", "ours": False, **result.to_dict()}
    regime, page_tokens = CORES[system - len(BASELINES)]
    pool = CorePool(regime, page_tokens, pool_tokens)
    result = replay(pool, shapes)
    pool.close()
    return {"system": f"{regime}, pages of {page_tokens}", "ours": True, **result.to_dict()}


def _table(trace: str, rows: list[dict[str, Any]], pool_tokens: int) -> Table:
    low, high = PAPER_EXISTING_USED_PERCENT
    return Table(
        f"{trace}: what {pool_tokens:,} positions hold while requests wait, percent",
        (
            "system",
            *PARTS,
            "states, % of what is allocated",
            "mean batch",
            "preempted",
        ),
        tuple(
            (
                row["system"],
                *(f"{row['percent'][part]:.1f}" for part in PARTS),
                f"{row['states_percent_of_allocated']:.1f}",
                f"{row['mean_batch']:.1f}",
                f"{row['num_preemptions']}",
            )
            for row in rows
        ),
        f"{pool_tokens:,} positions of OPT-13B are "
        f"{format_size(pool_tokens * OPT_13B_TOKEN_BYTES)}. Quoted from the PagedAttention paper: "
        f"existing systems hold token states in {low} to {high} % of KV memory, PagedAttention in "
        f"more than {PAGED_ATTENTION_USED_PERCENT_ABOVE:g} %; on ShareGPT it runs "
        f"{PAPER_TIMES_ORACLE_BATCH} times as many requests at once as the oracle and "
        f"{PAPER_TIMES_MAX_BATCH} times as many as max.",
    )
