"""``report.html``: one file that opens offline and prints, made from what ``results.json`` has."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

from vmserve.bench.ab.metrics import METRICS
from vmserve.bench.ab.record import MEMORY_STATES
from vmserve.bench.ab.style import STYLE
from vmserve.bench.ab.svg import Axis, Series, forest, lines, stacked
from vmserve.bench.lab.statistics import NO_DIFFERENCE, median

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["render"]

Json = dict[str, Any]

_MAX_POINTS = 300
_MIB = float(1 << 20)
_STATES = {
    "tokens": "tokens",
    "waste": "waste in used pages",
    "idle": "cached or parked",
    "in_transit": "on the way",
    "free": "committed, free",
}


def render(document: Mapping[str, Any]) -> str:
    """The page. Text that came from outside is escaped."""
    parts = [_head(document), _variants(document)]
    parts += [_workload(document, workload) for workload in document["workloads"]]
    parts += [_search(search) for search in document["searches"]]
    parts.append(_method(document))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>vmserve bench ab</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _head(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    names = [one["name"] for one in document["variants"]]
    revision = (machine["git_revision"] or "unknown")[:12]
    packages = machine["packages"]
    facts = (
        f"{document['date']} · {machine['cpu']}, {machine['num_usable_cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB · load at the end "
        f"{machine['load_average'][0]} · vmserve {packages['vmserve']}, torch {packages['torch']}, "
        f"Python {machine['python']} · revision {revision}"
    )
    return f"<h1>{escape(' against '.join(names))}</h1><p class='facts'>{escape(facts)}</p>"


def _variants(document: Mapping[str, Any]) -> str:
    rows = []
    for place, variant in enumerate(document["variants"]):
        options = ", ".join(f"{name}={value}" for name, value in variant["options"].items())
        page = f"{variant['page_bytes'] // 1024} KiB, {variant['page_tokens']} tokens"
        rows.append(
            [f'<i class="key c{place}"></i>{escape(variant["name"])}', escape(options), page]
        )
    return _table(["variant", "options", "page"], rows)


# -- a workload


def _workload(document: Mapping[str, Any], workload: Json) -> str:
    described = workload["described"]
    rounds = workload["rounds"]
    summary = (
        f"{described['num_requests']} requests, {described['mean_input_tokens']:.0f} tokens in "
        f"and {described['mean_output_tokens']:.0f} out on average, "
        f"{', '.join(described['decoding'])}; {described['load']}; {len(rounds)} rounds."
    )
    names = [one["name"] for one in document["variants"]]
    return "".join(
        [
            f"<section><h2>{escape(workload['name'])}</h2><p>{escape(summary)}</p>",
            *(_verdicts(names[0], name, found) for name, found in workload["comparisons"].items()),
            "<div class='plots'>",
            *(_figure(_forest(names[0], name, found))
              for name, found in workload["comparisons"].items()),
            *map(_figure, _latencies(names, rounds)),
            *map(_figure, _over_time(names, rounds)),
            "</div>",
            _metric_table(names, workload),
            "</section>",
        ]
    )  # fmt: skip


def _verdicts(first: str, name: str, comparisons: Sequence[Json]) -> str:
    judged = [one for one in comparisons if one["verdict"] is not None]
    shown = [one for one in judged if one["verdict"] != NO_DIFFERENCE]
    if not shown:
        text = f"{name} against {first}: no difference shown in {len(judged)} headline metrics."
        return f"<p>{escape(text)}</p>"
    found = "; ".join(
        f"<b class='{_kind(one)}'>{escape(METRICS[one['metric']].title)} "
        f"{(one['ratio'] - 1):+.1%}</b>"
        for one in shown
    )
    rest = len(judged) - len(shown)
    return (
        f"<p>{escape(name)} against {escape(first)}: {found}; "
        f"no difference shown in {rest} other headline metrics.</p>"
    )


def _kind(comparison: Mapping[str, Any]) -> str:
    """CSS class of a verdict."""
    better = METRICS[comparison["metric"]].better
    if comparison["verdict"] in (None, NO_DIFFERENCE) or better is None:
        return "neutral"
    return "better" if comparison["verdict"] == better else "worse"


def _forest(first: str, name: str, comparisons: Sequence[Json]) -> str:
    rows = [
        (
            METRICS[one["metric"]].title,
            one["ratio"],
            one["low"],
            math.inf if one["high"] is None else one["high"],
            _kind(one),
        )
        for one in comparisons
        if one["verdict"] is not None and one["low"] is not None
    ]
    return forest(f"{name} / {first}", "ratio, 99 % interval", rows) if rows else ""


def _latencies(names: Sequence[str], rounds: Sequence[Json]) -> list[str]:
    def ttft(request: Json) -> list[float]:
        return [request["ttft_us"] / 1000]

    def itl(request: Json) -> list[float]:
        return [gap / 1000 for gap in request["itl_us"]]

    def e2e(request: Json) -> list[float]:
        return [request["e2e_us"] / 1000]

    def normalized(request: Json) -> list[float]:
        return [request["e2e_us"] / 1000 / request["output_tokens"]]

    plots: list[tuple[str, Callable[[Json], list[float]]]] = [
        ("time to the first token", ttft),
        ("time between tokens", itl),
        ("end to end", e2e),
        ("normalized latency, per token", normalized),
    ]
    return [_cdf(title, names, rounds, read) for title, read in plots]


def _cdf(
    title: str, names: Sequence[str], rounds: Sequence[Json], read: Callable[[Json], list[float]]
) -> str:
    series = []
    for place, name in enumerate(names):
        values = sorted(
            max(value, 1e-3)
            for one in rounds
            for request in one["runs"][name]["requests"]
            for value in read(request)
        )
        points = [
            (values[min(len(values) - 1, math.floor(share * len(values)))], share)
            for share in (index / 200 for index in range(201))
            if values
        ]
        series.append(Series(name, points, place))
    return lines(title, Axis("ms", is_log=True), Axis("share of all rounds' samples", 1.0), series)


def _over_time(names: Sequence[str], rounds: Sequence[Json]) -> list[str]:
    """The round of median length, so that it is a usual one."""
    by_length = sorted(rounds, key=lambda one: float(one["runs"][names[0]]["elapsed_s"]))
    shown = by_length[(len(by_length) - 1) // 2]
    runs = {name: shown["runs"][name] for name in names}
    told = f"round {shown['index'] + 1}"
    end = max(run["elapsed_s"] for run in runs.values())
    peak = max(
        sum(column) / _MIB
        for run in runs.values()
        for column in zip(*(run["memory"][f"{state}_bytes"] for state in _STATES), strict=True)
    )
    return [
        _steps(f"sequences in a step, {told}", names, runs, end, "sequences", "sequences", 1.0),
        _steps(f"time of a step, {told}", names, runs, end, "took_us", "ms", 1e-3),
        _throughput(names, rounds),
        *(_memory(name, run, end, peak, told) for name, run in runs.items()),
        *(_regimes(name, run, end, told) for name, run in runs.items()),
    ]


def _steps(
    title: str,
    names: Sequence[str],
    runs: Mapping[str, Json],
    end: float,
    column: str,
    unit: str,
    factor: float,
) -> str:
    series = []
    for place, name in enumerate(names):
        steps = runs[name]["steps"]
        times = [at / 1e6 for at in steps["ended_us"]]
        values = [value * factor for value in steps[column]]
        series.append(Series(name, _largest(times, values), place))
    return lines(title, Axis("s", end), Axis(unit), series)


def _largest(times: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """Few enough points to draw; of each stretch the largest, so that no spike is lost."""
    stretch = -(-len(times) // _MAX_POINTS)
    points = []
    for begin in range(0, len(times), stretch):
        place = max(range(begin, min(begin + stretch, len(times))), key=lambda one: values[one])
        points.append((times[place], values[place]))
    return points


def _throughput(names: Sequence[str], rounds: Sequence[Json]) -> str:
    series = [
        Series(
            name,
            [(one["index"] + 1, one["metrics"][name]["output_tokens_per_s"]) for one in rounds],
            place,
            has_dots=True,
        )
        for place, name in enumerate(names)
    ]
    return lines("output tokens/s of every round", Axis("round"), Axis("tokens/s"), series)


def _thinned(run: Json) -> list[int]:
    count = len(run["memory"]["at_us"])
    stretch = -(-count // _MAX_POINTS)
    places = list(range(0, count, stretch))
    return places if places[-1] == count - 1 else [*places, count - 1]


def _memory(name: str, run: Json, end: float, peak: float, told: str) -> str:
    memory, places = run["memory"], _thinned(run)
    layers = [
        (_STATES[state], [memory[f"{state}_bytes"][place] / _MIB for place in places])
        for state in MEMORY_STATES
    ]
    times = [memory["at_us"][place] / 1e6 for place in places]
    title = f"{name}: KV memory by state, {told}"
    return stacked(title, Axis("s", end), Axis("MiB", peak), times, layers)


def _regimes(name: str, run: Json, end: float, told: str) -> str:
    memory, places = run["memory"], _thinned(run)
    times = [memory["at_us"][place] / 1e6 for place in places]
    layers = [
        (view, [float(memory[view][place]) for place in places]) for view in ("virtual", "paged")
    ]
    return stacked(
        f"{name}: sequences by view, {told}", Axis("s", end), Axis("sequences"), times, layers
    )


def _metric_table(names: Sequence[str], workload: Json) -> str:
    first, others = names[0], names[1:]
    found = {name: {one["metric"]: one for one in workload["comparisons"][name]} for name in others}
    head = ["metric, median over rounds", first]
    for name in others:
        head += [name, f"/ {first}", "verdict"]
    rows = []
    for metric in METRICS.values():
        values = {
            name: median([one["metrics"][name][metric.name] for one in workload["rounds"]])
            for name in names
        }
        if all(value is None for value in values.values()):
            continue
        row = [escape(metric.title), metric.format(values[first])]
        for name in others:
            row += [metric.format(values[name]), *_effect_cells(found[name].get(metric.name))]
        rows.append(row)
    return f"<details open><summary>All metrics</summary>{_table(head, rows)}</details>"


def _effect_cells(comparison: Json | None) -> list[str]:
    if comparison is None:
        return ["", ""]
    low, high = comparison["low"], comparison["high"]
    interval = ""
    if low is not None:
        interval = f" [{low:.3f}, {'∞' if high is None else format(high, '.3f')}]"
    kind = _kind(comparison)
    verdict = comparison["verdict"] or ""
    if kind != "neutral":
        verdict = kind
    return [f"{comparison['ratio']:.3f}{interval}", f'<span class="{kind}">{verdict}</span>']


# -- a search


def _search(search: Json) -> str:
    names = list(search["max_rate_per_s"])
    rows = []
    for name, rates in search["max_rate_per_s"].items():
        there = [rate for rate in rates if rate is not None]
        middle = f"{median(there):.3g}" if there else "-"
        cells = ["", ""]
        if (comparison := search["comparisons"].get(name)) is not None:
            high = "∞" if comparison["high"] is None else f"{comparison['high']:.3f}"
            interval = (
                f" [{comparison['low']:.3f}, {high}]" if comparison["low"] is not None else ""
            )
            cells = [f"{comparison['ratio']:.3f}{interval}", comparison["verdict"]]
        rows.append([escape(name), middle, f"{len(there)} of {len(rates)}", *cells])
    head = ["", "highest rate, requests/s", "rounds that found it", f"/ {names[0]}", "verdict"]
    plots = [
        _rates(names, search, "normalized_mean_s", "normalized latency, ms per token", 1e3),
        _rates(names, search, "ttft_p95_s", "TTFT p95, ms", 1e3),
        _rates(names, search, "goodput_share", "share of requests in time", 1.0),
    ]
    return (
        f"<section><h2>{escape(search['name'])}: the highest rate</h2>"
        f"<p>At which {search['goodput']:.0%} of requests meet their objectives.</p>"
        f"{_table(head, rows)}<div class='plots'>{''.join(map(_figure, plots))}</div></section>"
    )


def _rates(names: Sequence[str], search: Json, metric: str, title: str, factor: float) -> str:
    series = []
    for place, name in enumerate(names):
        points = sorted(
            (probe["rate_per_s"], probe["metrics"][metric] * factor)
            for probe in search["probes"]
            if probe["variant"] == name and probe["metrics"][metric] is not None
        )
        series.append(Series(name, points, place, has_dots=True))
    return lines(title, Axis("requests/s", is_log=True), Axis(title), series)


# -- the rest


def _method(document: Mapping[str, Any]) -> str:
    confidence = f"{document['confidence']:.0%}"
    return (
        "<section><h2>How to read this</h2><p>In every round each variant serves the same "
        "requests with the same seeds and arrival times, in an order that turns from round to "
        "round. A ratio is the geometric mean over rounds of variant / first; its interval is a "
        f"studentised bootstrap over these pairs ({confidence}), widened where rounds resemble the "
        "ones before them. A verdict is given where the "
        "p-value, corrected for a comparison's headline metrics (Holm), allows it; anything else "
        "is <i>no difference shown</i>, which is not the same as none. Latencies count from when "
        "a request was due. Curves pool all rounds; pictures over time are of the round of median "
        "length.</p></section>"
    )


def _figure(plot: str) -> str:
    return f"<figure>{plot}</figure>" if plot else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """``rows`` are HTML already."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<div class='scroll'><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody>"
        "</table></div>"
    )
