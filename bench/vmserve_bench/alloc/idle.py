"""What the pool still holds when traffic has ended, over what its prefix cache keeps.

After kvcached's benchmark of an idle instance (:func:`vmserve_bench.workloads.shapes.hot_cold`, 96
requests at once, Qwen3-4B's shape). Its *packed floor* is the memory of the cached blocks if their
pages had no holes; *over the floor* is the memory that is held divided by that. The real scheduler
and memory core serve the requests in virtual time; pages and blocks are counted, nothing is timed.

Ours has no bound on cached blocks: the cache keeps what the pool has room for (*idle*). For
kvcached's bound the pool's limit is lowered to as many tokens when all is idle (*bounded*).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from vmserve.memory.layout import CUDA_GRANULARITY, HOST_GRANULARITY, KVLayout, plan_layout
from vmserve_bench.alloc.reference import (
    KVCACHED_CACHED_TOKENS,
    KVCACHED_IDLE_OVER_FLOOR,
)
from vmserve_bench.alloc.section import Options
from vmserve_bench.lab.table import SectionResult, Table
from vmserve_bench.simulation import SimulatedEngine, SimulationConfig, asked
from vmserve_bench.simulation.devices import LLAMA_8B_A100
from vmserve_bench.workloads.shapes import hot_cold

if TYPE_CHECKING:
    from vmserve_bench.lab.report import Report

__all__ = ["layouts", "measure", "run"]

_NUM_LAYERS, _KV_HEADS, _HEAD_DIM = 36, 8, 128
_SEQS = 96
#: Tokens of the pool, more than 96 of the longest requests take, so that nothing is preempted.
_POOL_TOKENS = 200_000
REGIMES: tuple[Literal["virtual", "paged"], ...] = ("virtual", "paged")


def layouts() -> dict[str, KVLayout]:
    """The planner's pages on a GPU and on a host; and kvcached's, of one layer's K or V."""

    def layout(granularity: int, **options: Any) -> KVLayout:
        return plan_layout(_NUM_LAYERS, _KV_HEADS, _HEAD_DIM, "bfloat16", granularity, **options)

    return {
        "all layers, the default on a GPU": layout(CUDA_GRANULARITY, layers_per_group=_NUM_LAYERS),
        "each layer, the default on a host": layout(HOST_GRANULARITY),
        "each layer's K and V, 2 MiB each": layout(CUDA_GRANULARITY, split_kv=True),
    }


def measure(
    layout: KVLayout, regime: Literal["virtual", "paged"], num_requests: int, seed: int
) -> dict[str, Any]:
    """Serve the requests; count pages and cached blocks when idle, and within the bound."""
    token_bytes = layout.total_page_bytes // layout.page_tokens
    config = SimulationConfig(
        layout=layout,
        limit_bytes=_POOL_TOKENS * token_bytes,
        profile=LLAMA_8B_A100.profile,
        max_num_seqs=_SEQS,
        regime=regime,
    )
    found: dict[str, Any] = {"regime": regime, "page_tokens": layout.page_tokens}
    with SimulatedEngine(config) as engine:
        for request in asked(hot_cold(num_requests, seed), seed=seed):
            engine.add(request)
        while engine.has_unfinished:
            engine.step()
        found["preemptions"] = sum(record.num_preemptions for record in engine.run.requests)
        for state in ("idle", "bounded"):
            if state == "bounded":
                engine.memory.set_limit(KVCACHED_CACHED_TOKENS * token_bytes)
            stats = engine.memory.stats()
            held_blocks = stats.committed_pages * stats.blocks_per_page
            found[state] = {
                "pages": stats.committed_pages,
                "cached_blocks": stats.cached_blocks,
                "over_floor": held_blocks / stats.cached_blocks,
            }
        found["hit_blocks"] = stats.prefix_hit_blocks_total
        engine.memory.check()
    return found


def run(options: Options, report: Report) -> SectionResult:
    """Every kind of pages, in both regimes."""
    num_requests = 200 if options.quick else 2500
    cases = [(pages, layout, regime) for pages, layout in layouts().items() for regime in REGIMES]
    rows = []
    for pages, layout, regime in cases:
        rows.append({"pages": pages, **measure(layout, regime, num_requests, options.seed)})
        report(len(rows) / len(cases))
    table = Table(
        f"memory of an idle pool over its cached blocks, packed; {num_requests:,} requests before",
        (
            *("a page", "tokens", "regime"),
            *("idle: pages", "cached blocks", "over the floor"),
            *("bounded: pages", "cached blocks", "over the floor"),
        ),
        tuple(
            (
                row["pages"],
                f"{row['page_tokens']:,}",
                row["regime"],
                *(
                    cell
                    for state in (row["idle"], row["bounded"])
                    for cell in (
                        f"{state['pages']:,}",
                        f"{state['cached_blocks']:,}",
                        f"{state['over_floor']:.3f}",
                    )
                ),
            )
            for row in rows
        ),
        f"Bounded: to {KVCACHED_CACHED_TOKENS:,} tokens. Quoted from kvcached, so bounded and in "
        f"pages of 1,024 tokens: {KVCACHED_IDLE_OVER_FLOOR} times the floor.",
    )
    return SectionResult({"num_requests": num_requests, "rows": rows}, (table,))
