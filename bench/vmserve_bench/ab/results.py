"""``results.json``, and ``report.html``: one file that opens offline and prints."""

from __future__ import annotations

import dataclasses
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment

from vmserve_bench.ab import tables
from vmserve_bench.ab.metrics import METRICS, judgement
from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.report import dump, write_text
from vmserve_bench.lab.statistics import CONFIDENCE, NO_DIFFERENCE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vmserve_bench.ab.experiment import Engines, Settings, WorkloadResult
    from vmserve_bench.ab.variants import Variant
    from vmserve_bench.lab.table import Table

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "busy_warning",
    "describe_variants",
    "document",
    "render",
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


def render(document: Mapping[str, Any]) -> str:
    """The page of a results document. Text from outside is escaped."""
    # Imported late: matplotlib takes half a second, before anything is measured.
    from vmserve_bench.ab import plots  # noqa: PLC0415

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    source = Path(__file__).with_name("page.html.j2").read_text("utf-8")
    names = [one["name"] for one in document["variants"]]
    return environment.from_string(source).render(
        names=names,
        facts=_facts(document),
        variants=[
            (
                one["name"],
                ", ".join(f"{name}={value}" for name, value in one["options"].items()),
                f"{one['page_bytes'] // 1024} KiB, {one['page_tokens']} tokens",
            )
            for one in document["variants"]
        ],
        colors=[plots.COLORS[place % len(plots.COLORS)] for place in range(len(names))],
        workloads=[
            {
                "name": one["name"],
                "decoding": ", ".join(one["described"]["decoding"]),
                "verdicts": [(name, *_verdicts(each)) for name, each in one["comparisons"].items()],
                "table": tables.workload_table(one, everything=True),
                "plots": plots.workload(names, one),
            }
            for one in document["workloads"]
        ],
        searches=[
            (tables.search_table(one), plots.search(list(one["max_rate_per_s"]), one))
            for one in document["searches"]
        ],
        confidence=f"{document['confidence']:.0%}",
    )


def _facts(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    revision = (machine["git_revision"] or "unknown")[:12]
    packages = machine["packages"]
    return (
        f"{document['date']} · {machine['cpu']}, {machine['num_usable_cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB · load at the end "
        f"{machine['load_average'][0]} · vmserve {packages['vmserve']}, torch {packages['torch']}, "
        f"Python {machine['python']} · revision {revision}"
    )


def _verdicts(found: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[str, str]], int]:
    """Significant differences, each with its verdict, and the number of other headline metrics."""
    judged = [one for one in found if one["verdict"] is not None]
    shown = []
    for one in judged:
        metric = METRICS[one["metric"]]
        if one["verdict"] != NO_DIFFERENCE:
            change = f"{metric.title} {(one['ratio'] - 1):+.1%}"
            shown.append((judgement(one["verdict"], metric.better), change))
    return shown, len(judged) - len(shown)
