"""``report.html``: one file that opens offline and prints, made from what ``results.json`` has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment

from vmserve_bench.ab.metrics import METRICS, kind_of
from vmserve_bench.lab.statistics import NO_DIFFERENCE, median

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["render", "sizes_of"]

Json = dict[str, Any]


class Cell(NamedTuple):
    """``kind``: a class of the style sheet; ``color``: of the mark in front."""

    text: str
    kind: str = ""
    color: str = ""


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
        variants=list(_variants(document, plots.COLORS)),
        workloads=[
            {**_workload(names, one), "plots": plots.workload(names, one)}
            for one in document["workloads"]
        ],
        searches=[
            {**_search(one), "plots": plots.search(list(one["max_rate_per_s"]), one)}
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


def _variants(document: Mapping[str, Any], colors: Sequence[str]) -> Iterator[list[Cell]]:
    for place, variant in enumerate(document["variants"]):
        options = ", ".join(f"{name}={value}" for name, value in variant["options"].items())
        page = f"{variant['page_bytes'] // 1024} KiB, {variant['page_tokens']} tokens"
        name = Cell(variant["name"], color=colors[place % len(colors)])
        yield [name, Cell(options), Cell(page)]


def sizes_of(described: Mapping[str, Any]) -> str:
    """How many requests, and how long."""
    most = "at most " if described.get("may_end") else ""
    return (
        f"{described['num_requests']} requests, {described['mean_input_tokens']:.0f} tokens in and "
        f"{most}{described['mean_output_tokens']:.0f} out on average"
    )


def _workload(names: Sequence[str], workload: Json) -> Json:
    described = workload["described"]
    head = ["metric, median over rounds", names[0]]
    for name in names[1:]:
        head += [name, f"/ {names[0]}", "verdict"]
    return {
        "name": workload["name"],
        "summary": (
            f"{sizes_of(described)}, {', '.join(described['decoding'])}; {described['load']}; "
            f"{len(workload['rounds'])} rounds."
        ),
        "verdicts": [_verdicts(name, found) for name, found in workload["comparisons"].items()],
        "head": head,
        "rows": list(_metric_rows(names, workload)),
    }


def _verdicts(name: str, found: Sequence[Json]) -> tuple[str, list[tuple[str, str]], int]:
    """Significant differences, each with its class, and the number of other headline metrics."""
    judged = [one for one in found if one["verdict"] is not None]
    shown = [
        (kind_of(one), f"{METRICS[one['metric']].title} {(one['ratio'] - 1):+.1%}")
        for one in judged
        if one["verdict"] != NO_DIFFERENCE
    ]
    return name, shown, len(judged) - len(shown)


def _metric_rows(names: Sequence[str], workload: Json) -> Iterator[list[Cell]]:
    first, *others = names
    found = {name: {one["metric"]: one for one in workload["comparisons"][name]} for name in others}
    for metric in METRICS.values():
        values = {
            name: median([one["metrics"][name][metric.name] for one in workload["rounds"]])
            for name in names
        }
        if all(value is None for value in values.values()):
            continue
        row = [Cell(metric.title), Cell(metric.format(values[first]))]
        for name in others:
            row += [Cell(metric.format(values[name])), *_effect(found[name].get(metric.name))]
        yield row


def _effect(comparison: Json | None) -> list[Cell]:
    """The ratio with its interval, and the verdict."""
    if comparison is None:
        return [Cell(""), Cell("")]
    low, high = comparison["low"], comparison["high"]
    interval = ""
    if low is not None:
        interval = f" [{low:.3f}, {'∞' if high is None else format(high, '.3f')}]"
    kind = kind_of(comparison)
    verdict = (comparison["verdict"] or "") if kind == "neutral" else kind
    return [
        Cell(f"{comparison['ratio']:.3f}{interval}"),
        Cell(verdict, kind),
    ]


def _search(search: Json) -> Json:
    names = list(search["max_rate_per_s"])
    rows = []
    for name, rates in search["max_rate_per_s"].items():
        there = [rate for rate in rates if rate is not None]
        middle = f"{median(there):.3g}" if there else "-"
        effect = _effect(search["comparisons"].get(name))
        rows.append([Cell(name), Cell(middle), Cell(f"{len(there)} of {len(rates)}"), *effect])
    return {
        "name": search["name"],
        "goodput": f"{search['goodput']:.0%}",
        "head": [
            "",
            "highest rate, requests/s",
            "rounds that found it",
            f"/ {names[0]}",
            "verdict",
        ],
        "rows": rows,
    }
