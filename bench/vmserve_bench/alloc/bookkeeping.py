"""What the memory's own calls cost a decoding step that maps nothing.

Tokens are known, as in a server with prefix caching; slots show the next pages already. The times
include crossing from Python, and what that alone takes is measured as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vmserve import _core
from vmserve_bench.alloc.pool import Batch, Views, growths, open_pool, view_of
from vmserve_bench.alloc.section import Options, Times
from vmserve_bench.lab.statistics import summarize
from vmserve_bench.lab.table import SectionResult, table_of

if TYPE_CHECKING:
    from vmserve_bench.lab.report import Report

__all__ = ["driver_calls", "open_batch", "run"]

REGIMES: tuple[Views, ...] = ("virtual", "paged", "mixed")
#: Goal for plan and apply of 256 decoding sequences.
GOAL_PLAN_APPLY_NS = 150_000
PAGE_TOKENS = 256


def open_batch(regime: Views, num_seqs: int, num_steps: int) -> Batch:
    """A batch that can decode ``num_steps`` tokens without a call to the driver."""
    # A multiple of the page, so that warm slots have a page for every position.
    max_len = -(-(PAGE_TOKENS + num_steps + 2) // PAGE_TOKENS) * PAGE_TOKENS
    num_pages = num_seqs * (max_len // PAGE_TOKENS + 1)
    memory = open_pool(
        page_tokens=PAGE_TOKENS,
        token_bytes=16,  # pages of 4 KiB: nothing here depends on what is in them
        max_pages=num_pages,
        grow_pages=num_pages,
        max_seqs=num_seqs,
        max_len=max_len,
        seal_read_only=False,  # else every filled page is a call to the driver
    )
    views = [view_of(regime, index) for index in range(num_seqs)]
    slots = [view for view in views if view == _core.View.VIRTUAL]
    Batch(memory, slots, np.full(len(slots), max_len)).release()  # they stay mapped
    return Batch(memory, views, 1 + np.arange(num_seqs) * 7 % PAGE_TOKENS, known=True)


def driver_calls(memory: _core.KVMemory) -> int:
    now = memory.stats()
    return now.unhidden_calls_total + now.hidden_calls_total + now.unmap_calls_total


def run(options: Options, report: Report) -> SectionResult:
    """Median and p99 of each part, by number of sequences and regime; regimes interleaved."""
    counts = (16, 64) if options.quick else (64, 256, 1024)
    num_steps = 40 if options.quick else 2000
    rows: list[dict[str, Any]] = []
    for num_seqs in counts:
        batches = [open_batch(regime, num_seqs, num_steps) for regime in REGIMES]
        before = [driver_calls(batch.memory) for batch in batches]
        for _ in range(num_steps):
            for batch in batches:
                batch.step()
        for regime, batch, calls in zip(REGIMES, batches, before, strict=True):
            together = np.add(batch.times["plan_step"], batch.times["apply_step"])
            rows.append(
                {
                    "regime": regime,
                    "num_seqs": num_seqs,
                    "parts_ns": {part: summarize(t).to_dict() for part, t in batch.times.items()},
                    "plan_apply_ns": summarize(together.tolist()).to_dict(),
                    "driver_calls": driver_calls(batch.memory) - calls,
                }
            )
            batch.memory.check()
            batch.memory.close()
        report(len(rows) / (len(counts) * len(REGIMES)))
    data = {
        "num_steps": num_steps,
        "page_tokens": PAGE_TOKENS,
        "goal_plan_apply_ns": GOAL_PLAN_APPLY_NS,
        "rows": rows,
        "python_ns": _call_overhead(200 if options.quick else 5000),
    }
    parts = [f"parts_ns/{part}/median" for part in rows[0]["parts_ns"]]
    columns = ["num_seqs", "regime", *parts, "plan_apply_ns/median", "plan_apply_ns/p99"]
    tables = (
        table_of("bookkeeping of a decoding step with nothing to map", rows, columns),
        table_of("calls that have nothing to do: median", [data], ["python_ns"]),
    )
    return SectionResult(data, tables)


def _call_overhead(repeats: int) -> dict[str, float]:
    """Medians of a call that only locks, and of plan and apply of an empty step."""
    memory = open_pool(page_tokens=256, token_bytes=16, max_pages=1, max_seqs=1, max_len=256)
    none, times = growths([], []), Times()
    for _ in range(repeats):
        times.take("begun_epoch", getattr, memory, "begun_epoch")
        plan = times.take("plan_step", memory.plan_step, none)
        memory.complete(times.take("apply_step", memory.apply_step, none, plan.version))
    memory.close()
    return {name: summarize(samples).median for name, samples in times.items()}
