"""``report.html``: one file that opens offline and prints, made from what ``results.json`` has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment

from vmserve_bench.ab.metrics import METRICS, judgement
from vmserve_bench.ab.tables import search_table, workload_table
from vmserve_bench.lab.statistics import NO_DIFFERENCE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["render"]


def render(document: Mapping[str, Any]) -> str:
    """The page. Text from outside is escaped."""
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
                "table": workload_table(one, everything=True),
                "plots": plots.workload(names, one),
            }
            for one in document["workloads"]
        ],
        searches=[
            (search_table(one), plots.search(list(one["max_rate_per_s"]), one))
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
