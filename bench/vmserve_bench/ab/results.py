"""``results.json`` and the tables: what was measured, for programs and for people."""

from __future__ import annotations

import dataclasses
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from vmserve_bench.ab import tables
from vmserve_bench.ab.metrics import METRICS
from vmserve_bench.ab.page import render
from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.report import dump, write_text
from vmserve_bench.lab.statistics import CONFIDENCE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from vmserve_bench.ab.experiment import Engines, Settings, WorkloadResult
    from vmserve_bench.ab.variants import Variant
    from vmserve_bench.lab.table import Table

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "busy_warning",
    "describe_variants",
    "document",
    "workload_table",
    "write",
]

SCHEMA = "vmserve-bench-ab"
#: Version of the format, raised when a reader of older files would misread newer ones.
SCHEMA_VERSION = 1


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
    searches: Sequence[Mapping[str, Any]],
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
        "workloads": [_workload(result) for result in workloads],
        "searches": list(searches),
    }


def _workload(result: WorkloadResult) -> dict[str, Any]:
    return {
        "name": result.workload.name,
        "described": dict(result.workload.described),
        "load": dataclasses.asdict(result.workload.load),
        "comparisons": result.comparisons,
        "same_answers": result.same_answers,
        "rounds": list(result.rounds),
    }


def workload_table(result: WorkloadResult, *, everything: bool = False) -> Table:
    """Table of medians over rounds, and of every variant against the first."""
    return tables.workload_table(_workload(result), everything=everything)


def write(described: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write ``results.json`` and ``report.html``; return their paths."""
    texts = {"results.json": dump(described), "report.html": render(described)}
    for name, text in texts.items():
        write_text(directory / name, text)
    return [directory / name for name in texts]
