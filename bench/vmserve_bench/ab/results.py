"""``results.json`` and the tables: what was measured, for programs and for people."""

from __future__ import annotations

import dataclasses
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from vmserve_bench.ab.metrics import METRICS, Metric
from vmserve_bench.ab.page import render, sizes_of
from vmserve_bench.ab.search import MAX_RATE
from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.report import dump, write_text
from vmserve_bench.lab.statistics import (
    CONFIDENCE,
    MIN_PAIRS,
    NO_DIFFERENCE,
    Comparison,
    Effect,
    median,
)
from vmserve_bench.lab.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vmserve_bench.ab.experiment import Engines, Settings, WorkloadResult
    from vmserve_bench.ab.search import SearchResult
    from vmserve_bench.ab.variants import Variant

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "busy_warning",
    "describe_variants",
    "document",
    "format_effect",
    "judgement",
    "search_table",
    "workload_table",
    "write",
]

SCHEMA = "vmserve-bench-ab"
#: Version of the format, raised when a reader of older files would misread newer ones.
SCHEMA_VERSION = 1

_ALWAYS_SHOWN = (
    "goodput_per_s",
    "goodput_share",
    "kv_token_share",
    "sharing_saved_share",
    "prefix_hit_rate",
    "virtual_share",
    "attention_predicted",
    "preemptions",
    "calls_unhidden",
    "calls_hidden",
    "conversions",
    "drafted_tokens",
    "accepted_share",
    "tokens_per_row",
    "cost_per_million",
)


def busy_warning() -> str:
    """Warn where other work would widen the intervals; "" on a quiet machine."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load < 0.5 * cores:
        return ""
    return (
        f"The machine is busy (load {load:.1f} on {cores} cores): other work widens the intervals "
        "and slows every variant."
    )


def describe_variants(variants: Sequence[Variant], engines: Engines) -> list[dict[str, Any]]:
    """Describe each variant's resolved options. Makes the engines, so errors show here."""
    described = []
    for variant in variants:
        with engines.use(variant.name) as engine:
            layout = engine.memory.layout
            described.append(
                {
                    "name": variant.name,
                    "options": dict(variant.options),
                    "resolved": dataclasses.asdict(engine.resolved),
                    "page_bytes": layout.total_page_bytes,
                    "page_tokens": layout.page_tokens,
                }
            )
    return described


def document(
    options: Mapping[str, Any],
    described_variants: Sequence[Mapping[str, Any]],
    settings: Settings,
    workloads: Sequence[WorkloadResult],
    searches: Sequence[SearchResult],
) -> dict[str, Any]:
    """Build the results document, raw samples included."""
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": {**machine_info(), "load_average": [round(one, 2) for one in os.getloadavg()]},
        "options": dict(options),
        "settings": dataclasses.asdict(settings),
        "variants": [dict(one) for one in described_variants],
        "confidence": CONFIDENCE,
        "metrics": {
            metric.name: {
                "title": metric.title,
                "unit": metric.unit,
                "better": metric.better,
                "is_headline": metric.is_headline,
            }
            for metric in METRICS.values()
        },
        "workloads": [_workload_dict(result) for result in workloads],
        "searches": [_search_dict(result) for result in searches],
    }


def write(described: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write ``results.json`` and ``report.html``; return their paths."""
    texts = {"results.json": dump(described), "report.html": render(described)}
    for name, text in texts.items():
        write_text(directory / name, text)
    return [directory / name for name in texts]


def _workload_dict(result: WorkloadResult) -> dict[str, Any]:
    return {
        "name": result.workload.name,
        "described": dict(result.workload.described),
        "load": dataclasses.asdict(result.workload.load),
        "comparisons": {
            name: [comparison.to_dict() for comparison in comparisons]
            for name, comparisons in result.comparisons.items()
        },
        "same_answers": {
            name: {"same": same, "of": total} for name, (same, total) in result.same_answers.items()
        },
        "rounds": [
            {
                "index": one.index,
                "seed": one.seed,
                "order": list(one.order),
                "metrics": {name: dict(metrics) for name, metrics in one.metrics.items()},
                "runs": {name: record.to_dict() for name, record in one.records.items()},
            }
            for one in result.rounds
        ],
    }


def _search_dict(result: SearchResult) -> dict[str, Any]:
    return {
        "name": result.search.name,
        "described": dict(result.search.described),
        "goodput": result.search.goodput,
        "closed_loop_per_s": result.closed_loop_per_s,
        MAX_RATE: {name: list(rates) for name, rates in result.rates.items()},
        "comparisons": {
            name: None if comparison is None else comparison.to_dict()
            for name, comparison in result.comparisons.items()
        },
        "probes": [
            {
                "round": probe.round,
                "variant": probe.variant,
                "rate_per_s": probe.rate,
                "passed": probe.passed,
                "metrics": dict(probe.metrics),
            }
            for probe in result.probes
        ],
    }


def format_effect(effect: Effect) -> str:
    """The ratio and its interval."""
    if effect.low is None or effect.high is None:
        return f"{effect.ratio:.3f}"
    return f"{effect.ratio:.3f} [{effect.low:.3f}, {effect.high:.3f}]"


def judgement(comparison: Comparison, metric: Metric) -> str:
    """The verdict in words: better or worse where the metric has a direction; "" without one."""
    if comparison.verdict is None:
        return ""
    if comparison.verdict == NO_DIFFERENCE:
        return "no difference shown"
    if metric.better is None:
        return comparison.verdict
    return "better" if comparison.verdict == metric.better else "worse"


def workload_table(result: WorkloadResult, *, everything: bool = False) -> Table:
    """Table of medians over rounds, and of every variant against the first."""
    names = list(result.rounds[0].records)
    first, others = names[0], names[1:]
    columns = ["", first]
    for name in others:
        columns += [name, f"{name} / {first}", "verdict"]
    rows = []
    for metric in METRICS.values():
        medians = {name: median(result.values(name, metric.name)) for name in names}
        if not (everything or metric.is_headline or metric.name in _ALWAYS_SHOWN):
            continue
        if all(value is None for value in medians.values()):
            continue
        row = [metric.title, metric.format(medians[first])]
        for name in others:
            found = {one.metric: one for one in result.comparisons[name]}.get(metric.name)
            row += [
                metric.format(medians[name]),
                "" if found is None else format_effect(found.effect),
                "" if found is None else judgement(found, metric),
            ]
        rows.append(tuple(row))
    return Table(_title(result), tuple(columns), tuple(rows), _note(result))


def _title(result: WorkloadResult) -> str:
    described = result.workload.described
    return (
        f"{result.workload.name}: {sizes_of(described)}, {described['load']}, "
        f"{len(result.rounds)} rounds"
    )


def _note(result: WorkloadResult) -> str:
    answers = [f"{name}: {same} of {total}" for name, (same, total) in result.same_answers.items()]
    lines = [
        f"Medians; ratios: geometric means of paired rounds with {CONFIDENCE:.0%} intervals.",
        f"Answers that are the first variant's to the token: {', '.join(answers)}.",
    ]
    if len(result.rounds) < MIN_PAIRS:
        lines.append(
            f"No intervals and no verdicts: they take {MIN_PAIRS} rounds, "
            f"these are {len(result.rounds)}."
        )
    return " ".join(lines)


def search_table(result: SearchResult) -> Table:
    """Table of the highest rate of each variant."""
    first = next(iter(result.rates))
    rows = []
    for name, rates in result.rates.items():
        comparison = result.comparisons.get(name)
        there = [rate for rate in rates if rate is not None]
        middle = median(rates)
        rows.append(
            (
                name,
                "-" if middle is None else f"{middle:.3g}",
                f"{len(there)} of {len(rates)}",
                "" if comparison is None else format_effect(comparison.effect),
                "" if comparison is None else judgement(comparison, _RATE),
            )
        )
    low, high = result.bounds
    return Table(
        f"{result.search.name}: highest rate with {result.search.goodput:.0%} of requests in time",
        ("", "requests/s", "rounds that found it", f"/ {first}", "verdict"),
        tuple(rows),
        f"Searched from {low:.3g} to {high:.3g} requests/s. A comparison needs every round.",
    )


_RATE = Metric(MAX_RATE, "highest rate", "rate", "higher", True)
