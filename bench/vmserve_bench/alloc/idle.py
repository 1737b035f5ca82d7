"""What the pool still holds when traffic has ended, over what its prefix cache keeps.

After ``benchmarks/bench_idle_footprint`` of ovg-project/kvcached at 5315e343 (NVIDIA L40). Its
*packed floor* is the memory of the cached blocks if their pages had no holes. The real scheduler
and memory core serve the requests in virtual time; pages and blocks are counted, nothing is timed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from vmserve.memory.layout import CUDA_GRANULARITY, HOST_GRANULARITY, KVLayout, plan_layout
from vmserve_bench.alloc.section import Options
from vmserve_bench.lab.table import SectionResult, table_of
from vmserve_bench.simulation import SimulatedEngine, SimulationConfig, asked, replay
from vmserve_bench.simulation.devices import LLAMA_8B_A100
from vmserve_bench.workloads.shapes import hot_cold

if TYPE_CHECKING:
    from vmserve_bench.lab.report import Report

__all__ = ["CACHED_TOKENS", "layouts", "measure", "run"]

#: Tokens of the pool, more than 96 of the longest requests take, so that nothing is preempted.
_POOL_TOKENS = 200_000
#: Most tokens that kvcached's prefix cache keeps.
CACHED_TOKENS = 16_000
Regime = Literal["virtual", "paged"]


def layouts() -> dict[str, KVLayout]:
    """The planner's pages on a GPU and on a host; and kvcached's, of one layer's K or V."""
    options: dict[str, tuple[int, dict[str, Any]]] = {
        "all layers, the default on a GPU": (CUDA_GRANULARITY, {"layers_per_group": 36}),
        "each layer, the default on a host": (HOST_GRANULARITY, {}),
        "each layer's K and V, 2 MiB each": (CUDA_GRANULARITY, {"split_kv": True}),
    }
    return {
        name: plan_layout(36, 8, 128, "bfloat16", granularity, **more)  # Qwen3-4B's shape
        for name, (granularity, more) in options.items()
    }


def measure(layout: KVLayout, regime: Regime, num_requests: int, seed: int) -> dict[str, Any]:
    """Serve the requests; count pages and cached blocks when idle, and within the bound."""
    token_bytes = layout.total_page_bytes // layout.page_tokens
    config = SimulationConfig(
        layout=layout,
        limit_bytes=_POOL_TOKENS * token_bytes,
        profile=LLAMA_8B_A100.profile,
        max_num_seqs=96,
        regime=regime,
    )
    found: dict[str, Any] = {"regime": regime, "page_tokens": layout.page_tokens}
    with SimulatedEngine(config) as engine:
        served = replay(engine, asked(hot_cold(num_requests, seed), seed=seed)).requests
        found["preemptions"] = sum(record.num_preemptions for record in served)
        for state in ("idle", "bounded"):
            if state == "bounded":
                engine.memory.set_limit(CACHED_TOKENS * token_bytes)
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
    regimes: tuple[Regime, ...] = ("virtual", "paged")
    rows: list[dict[str, Any]] = []
    for pages, layout in layouts().items():
        for regime in regimes:
            found = measure(layout, regime, num_requests, options.seed)
            rows.append({"pages": pages, **found})
            report(len(rows) / 6)
    table = table_of(
        f"memory of an idle pool over its cached blocks, packed; {num_requests:,} requests before",
        rows,
        ("pages", "page_tokens", "regime", "idle", "bounded"),
        f"Bounded: to {CACHED_TOKENS:,} tokens. Quoted from kvcached, so bounded and in pages of "
        "1,024 tokens: 1.4 times the floor.",
    )
    return SectionResult({"num_requests": num_requests, "rows": rows}, (table,))
