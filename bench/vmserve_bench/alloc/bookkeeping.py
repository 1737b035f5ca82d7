"""Cost of the memory's own calls in a decoding step that maps nothing, by part.

Every sequence decodes one token a step. Tokens are known (``append_tokens``), so that blocks are
named and published as they fill, as a server with prefix caching has it. Virtual sequences find
the pages that they grow into already mapped in their slots; the paged ones take blocks. No step
calls the driver: the counters are checked.

The time of a call includes crossing from Python; what that alone takes is measured as well.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vmserve import _core
from vmserve_bench.alloc.pool import grow, growths, open_pool, open_sequences
from vmserve_bench.alloc.section import Options
from vmserve_bench.lab.statistics import summarize
from vmserve_bench.lab.table import SectionResult, Table, microseconds

if TYPE_CHECKING:
    from vmserve_bench.lab.report import Report

__all__ = ["GOAL_PLAN_APPLY_NS", "PARTS", "REGIMES", "Decoder", "run"]

Regime = Literal["virtual", "paged", "mixed"]
REGIMES: tuple[Regime, ...] = ("virtual", "paged", "mixed")
PARTS = ("plan_step", "apply_step", "complete", "append_tokens")
#: Goal for plan and apply of 256 decoding sequences.
GOAL_PLAN_APPLY_NS = 150_000

PAGE_TOKENS = 256
TOKEN_BYTES = 16  # pages of 4 KiB: nothing here depends on what is in them


class Decoder:
    """``num_seqs`` sequences that decode; :meth:`step` times each part once."""

    def __init__(self, regime: Regime, num_seqs: int, num_steps: int) -> None:
        start = 1 + np.arange(num_seqs, dtype=np.int64) * 7 % PAGE_TOKENS
        # NOTE: a multiple of the page, so that warm slots have a page for every position.
        max_len = -(-(PAGE_TOKENS + num_steps + 2) // PAGE_TOKENS) * PAGE_TOKENS
        num_pages = num_seqs * (max_len // PAGE_TOKENS + 1)
        self.memory = open_pool(
            page_tokens=PAGE_TOKENS,
            token_bytes=TOKEN_BYTES,
            max_pages=num_pages,
            grow_pages=num_pages,
            max_seqs=num_seqs,
            max_len=max_len,
            seal_read_only=False,  # else every filled page is a call to the driver
        )
        views = [
            _core.View.PAGED
            if regime == "paged" or (regime == "mixed" and index % 2)
            else _core.View.VIRTUAL
            for index in range(num_seqs)
        ]
        self._map_slots(views, max_len)
        self.seqs = []
        for index, (view, length) in enumerate(zip(views, start.tolist(), strict=True)):
            # Prompts have no common prefix.
            (seq,) = open_sequences(self.memory, [view], [index] * length)
            self.seqs.append(seq)
        self._lengths = start
        self.memory.complete(grow(self.memory, growths(self.seqs, start)))
        self._tokens = list(range(num_seqs))
        self.memory.append_tokens(self.seqs, self._tokens)
        self.samples: dict[str, list[int]] = {part: [] for part in PARTS}
        self.before = self.memory.stats()

    def _map_slots(self, views: list[_core.View], max_len: int) -> None:
        """Park as many fully mapped slots as there are virtual sequences."""
        virtual = [view for view in views if view == _core.View.VIRTUAL]
        seqs = open_sequences(self.memory, virtual)
        rows = growths(seqs, [max_len] * len(seqs))
        self.memory.complete(grow(self.memory, rows))
        for seq in seqs:
            self.memory.release(seq)

    def step(self) -> None:
        memory = self.memory
        self._lengths += 1
        rows = growths(self.seqs, self._lengths)
        t0 = perf_counter_ns()
        plan = memory.plan_step(rows)
        t1 = perf_counter_ns()
        epoch = memory.apply_step(rows, plan.version)
        t2 = perf_counter_ns()
        memory.complete(epoch)
        t3 = perf_counter_ns()
        memory.append_tokens(self.seqs, self._tokens)
        t4 = perf_counter_ns()
        for part, spent in zip(PARTS, (t1 - t0, t2 - t1, t3 - t2, t4 - t3), strict=True):
            self.samples[part].append(spent)

    @property
    def driver_calls(self) -> int:
        """Calls to the driver since the sequences were set up."""
        now = self.memory.stats()
        names = ("unhidden_calls_total", "hidden_calls_total", "unmap_calls_total")
        return int(sum(getattr(now, name) - getattr(self.before, name) for name in names))


def run(options: Options, report: Report) -> SectionResult:
    """Median and p99 of each part, by number of sequences and regime; regimes interleaved."""
    counts = (16, 64) if options.quick else (64, 256, 1024)
    num_steps = 40 if options.quick else 2000
    rows: list[dict[str, Any]] = []
    for index, num_seqs in enumerate(counts):
        decoders = {regime: Decoder(regime, num_seqs, num_steps) for regime in REGIMES}
        for step in range(num_steps):
            for decoder in decoders.values():
                decoder.step()
            if step % 50 == 0:
                report((index + step / num_steps) / len(counts))
        for regime, decoder in decoders.items():
            rows.append(_row(regime, num_seqs, decoder))
            decoder.memory.check()
            decoder.memory.close()
    overhead = _call_overhead(200 if options.quick else 5000)
    report(1.0)
    data = {
        "num_steps": num_steps,
        "page_tokens": PAGE_TOKENS,
        "goal_plan_apply_ns": GOAL_PLAN_APPLY_NS,
        "rows": rows,
        "python_ns": overhead,
    }
    return SectionResult(data, (_table(rows), _overhead_table(overhead)))


def _row(regime: Regime, num_seqs: int, decoder: Decoder) -> dict[str, Any]:
    together = np.array(decoder.samples["plan_step"]) + np.array(decoder.samples["apply_step"])
    return {
        "regime": regime,
        "num_seqs": num_seqs,
        "parts_ns": {part: summarize(decoder.samples[part]).to_dict() for part in PARTS},
        "plan_apply_ns": summarize(together.tolist()).to_dict(),
        "driver_calls": decoder.driver_calls,
    }


def _call_overhead(repeats: int) -> dict[str, float]:
    """Medians of a call that only locks, and of plan and apply of an empty step."""
    memory = open_pool(page_tokens=256, token_bytes=16, max_pages=1, max_seqs=1, max_len=256)
    none = growths([], [])
    samples: dict[str, list[int]] = {"begun_epoch": [], "plan_step": [], "apply_step": []}
    for _ in range(repeats):
        t0 = perf_counter_ns()
        _ = memory.begun_epoch
        t1 = perf_counter_ns()
        plan = memory.plan_step(none)
        t2 = perf_counter_ns()
        epoch = memory.apply_step(none, plan.version)
        t3 = perf_counter_ns()
        memory.complete(epoch)
        for name, spent in zip(samples, (t1 - t0, t2 - t1, t3 - t2), strict=True):
            samples[name].append(spent)
    memory.close()
    return {name: summarize(values).median for name, values in samples.items()}


def _table(rows: list[dict[str, Any]]) -> Table:
    def cell(summary: dict[str, float]) -> str:
        return f"{microseconds(summary['median'])} / {microseconds(summary['p99'])}"

    return Table(
        "bookkeeping of a decoding step with nothing to map: microseconds, median / p99",
        ("sequences", "regime", *PARTS, "plan + apply"),
        tuple(
            (
                f"{row['num_seqs']:,}",
                row["regime"],
                *(cell(row["parts_ns"][part]) for part in PARTS),
                cell(row["plan_apply_ns"]),
            )
            for row in rows
        ),
        f"Goal: plan + apply of 256 sequences within {GOAL_PLAN_APPLY_NS / 1e3:g} us.",
    )


def _overhead_table(overhead: dict[str, float]) -> Table:
    return Table(
        "calls that have nothing to do: microseconds, median",
        ("call", "us"),
        tuple((name, microseconds(value)) for name, value in overhead.items()),
    )
