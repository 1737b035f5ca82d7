"""``vmserve bench compare``: is the second results file better or worse than the first?

Rounds are paired by their place where both files have as many of the same seeds: each pair served
the same requests. With fewer rounds than an interval takes, requests are paired instead. Runs of
two files lie apart in time, so that what the machine did meanwhile is part of every ratio.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vmserve.errors import ConfigurationError
from vmserve_bench import options as opt
from vmserve_bench.ab.metrics import METRICS, Metric, headline_names
from vmserve_bench.ab.tables import effect_cells
from vmserve_bench.compare_cases import Case, read, read_cases
from vmserve_bench.lab.report import dump, make_console, write_text
from vmserve_bench.lab.statistics import MIN_PAIRS, Comparison, compare_metrics, median
from vmserve_bench.lab.table import Table, print_table

__all__ = ["compare_cases", "compare_command", "regressions"]

#: Fields that are equal if two requests of equal place are the same.
_SAME = ("input_tokens", "output_tokens", "sequences")
_SETTINGS = ("quick", "seed", "minutes", "model", "driver", "isa", "num_threads")
_SECTIONS = ("options", "settings", "slo", "server", "latency_model")
_MACHINE = ("cpu", "num_usable_cores", "memory_bytes", "python", "git_revision")
_REQUEST_METRICS = {
    name: Metric(name, title, "s", "lower", True)
    for name, title in (
        ("ttft", "TTFT of a request"),
        ("tpot", "TPOT of a request"),
        ("e2e", "end to end"),
    )
}
_NOTES = {
    "rounds": "Rounds of the same requests in pairs, 99 % intervals.",
    "repeats": f"99 % intervals where both files have {MIN_PAIRS} repeats or more; each row is "
    "judged by itself. One value says nothing about its error.",
    "requests": f"Fewer than {MIN_PAIRS} rounds: latencies of the same requests in pairs, 99 % "
    "intervals. Requests of one run wait for each other, so that these are too narrow.",
    "": "Nothing could be paired: ratios of medians, without intervals.",
}


def compare_cases(first: Case, other: Case) -> tuple[list[Comparison], str]:
    """Comparisons, and the pairs: "rounds", "requests", "repeats", or "" for none."""
    if first.own:
        # Repeats that both have; a row's columns are judged together.
        rows: dict[tuple[str, int], list[str]] = {}
        for name in filter(other.own.__contains__, first.own):
            count = min(len(first.columns[name]), len(other.columns[name]))
            rows.setdefault((name.rpartition("|")[0], count), []).append(name)
        found = []
        for (_, count), names in rows.items():
            left, right = (
                {name: case.columns[name][:count] for name in names} for case in (first, other)
            )
            found += compare_metrics(left, right, names)
        return found, "repeats"
    if first.seeds == other.seeds and len(first.seeds) >= MIN_PAIRS:
        return compare_metrics(first.columns, other.columns, headline_names()), "rounds"
    pairs = [
        (request, other.requests[key])
        for key, request in first.requests.items()
        if key in other.requests
        and all(request[name] == other.requests[key][name] for name in _SAME)
    ]
    if not pairs:
        return [], ""
    a, b = (_latencies([pair[side] for pair in pairs]) for side in range(2))
    # Per token has fewer values than the others, which all rows of one call must share.
    found = [one for name in a for one in compare_metrics({name: a[name]}, {name: b[name]}, [name])]
    return found, "requests"


def _latencies(requests: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    return {
        "ttft": [request["ttft_us"] / 1e6 for request in requests],
        "tpot": [
            (request["e2e_us"] - request["ttft_us"]) / 1e6 / (request["output_tokens"] - 1)
            for request in requests
            if request["output_tokens"] > 1
        ],
        "e2e": [request["e2e_us"] / 1e6 for request in requests],
    }


def metric_of(case: Case, name: str) -> Metric:
    """The metric behind a name of :func:`compare_cases`."""
    return case.own.get(name) or _REQUEST_METRICS.get(name) or METRICS[name]


def regressions(
    case: Case, comparisons: Sequence[Comparison], percent: float
) -> tuple[list[str], int]:
    """Headlines significantly worse by over ``percent``, and how many had an interval."""
    worse, judged = [], 0
    for one in comparisons:
        metric, effect = metric_of(case, one.metric), one.effect
        has_interval = effect.low is not None and effect.high is not None
        if one.verdict is None or metric.better is None or not has_interval:
            continue
        judged += 1
        if metric.better == "lower":
            is_worse = (effect.low or 0.0) > 1.0 + percent / 100.0
        else:
            is_worse = (effect.high or 0.0) < 1.0 - percent / 100.0
        if is_worse:
            worse.append(f"{case.name}: {metric.title} {effect_cells(one.to_dict(), None)[0]}")
    return worse, judged


def warnings(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Differences between the files besides the measurements."""

    def differ(names: Sequence[str], before: str, *values: Mapping[str, Any]) -> list[str]:
        a, b = values
        return [
            f"{before}{name if before else name.replace('_', ' ')}: {a.get(name)} and {b.get(name)}"
            for name in names or sorted(a.keys() | b.keys())
            if a.get(name) != b.get(name)
        ]

    files = first, other
    machines = [one["machine"] for one in files]
    failed = [
        sum(len(one.get("failures", ())) for one in found.get("rounds", ())) for found in files
    ]
    lines = differ(_MACHINE, "", *machines)
    lines += differ((), "", *(one.get("packages", {}) for one in machines))
    if any(failed):
        lines.append(f"failed requests, which no latency has: {failed[0]} and {failed[1]}")
    lines += differ(_SETTINGS, "", *files)
    for section in _SECTIONS:
        lines += differ((), f"{section}, ", *(one.get(section) or {} for one in files))
    return lines


def _matched(
    first: Sequence[Case], other: Sequence[Case], paths: tuple[Path, Path]
) -> list[tuple[Case, Case]]:
    by_name = {case.name: case for case in other}
    found = [(case, by_name[case.name]) for case in first if case.name in by_name]
    found = [(a, b) for a, b in found if not a.own or a.own.keys() & b.own.keys()]
    if not found:
        told = " and ".join(
            f"{path} has {'; '.join(case.name for case in cases) or 'none'}"
            for path, cases in zip(paths, (first, other), strict=True)
        )
        raise ConfigurationError(f"no workload and variant, or section, is in both files: {told}")
    for a, b in found:
        if any(a.described.get(name) != b.described.get(name) for name in ("is_open", "decoding")):
            raise ConfigurationError(
                f"{a.name}: the loads are of different kinds (open and closed loop, or decoding) "
                "in the two files, and their ratio would say nothing: measure both alike"
            )
    return found


def _table(
    a: Case, b: Case, found: Sequence[Comparison], paired: str, names: tuple[str, str]
) -> Table:
    comparisons = {one.metric: one for one in found}
    rows = []
    shown = [name for name in a.own if name in b.own] or headline_names()
    for name in [*shown, *(one for one in comparisons if one in _REQUEST_METRICS)]:
        metric = metric_of(a, name)
        left, right = (median(case.columns.get(name, ())) for case in (a, b))
        comparison = comparisons.get(name)
        if left is None and right is None and comparison is None:
            continue
        ratio, verdict = f"{right / left:.3f}" if left and right else "-", ""
        if comparison is not None:
            ratio, told = effect_cells(comparison.to_dict(), metric.better)
            verdict = "" if comparison.effect.low is None else told
        rows.append((metric.title, metric.format(left), metric.format(right), ratio, verdict))
    return Table(a.name, ("", *names, "ratio", "verdict"), tuple(rows), _NOTES[paired])


def compare_command(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="The first is what others are held against."),
    ],
    json_path: opt.JsonPath = None,
    fail_above: Annotated[
        float | None,
        typer.Option(
            help="Exit status 1 where a headline metric is worse by more than so many percent, its "
            "whole interval included.",
            metavar="PERCENT",
        ),
    ] = None,
) -> None:
    """Compare results files of two runs of a benchmark command, whichever it is.

    Ratios are second / first, with 99 % intervals where both have 6 rounds of the same seeds (or
    repeats); with fewer rounds, latencies are compared request by request.

    Example, for a check in CI: vmserve bench compare main/results.json branch/results.json
    --fail-above 5
    """
    if len(files) < 2:
        raise ConfigurationError("compare takes two files or more")
    if fail_above is not None and not (math.isfinite(fail_above) and fail_above >= 0):
        raise ConfigurationError(f"--fail-above: {fail_above:g} is no number from 0")
    documents = [read(path) for path in files]
    schemas = {str(document["schema"]) for document in documents}
    if len(schemas) > 1:
        raise ConfigurationError(
            f"these are results of different commands ({', '.join(sorted(schemas))}), which do not "
            "measure alike: give files of one command"
        )
    console = make_console()
    worse: list[str] = []
    num_judged = 0
    described: list[dict[str, Any]] = []
    first = documents[0]
    for path, other in zip(files[1:], documents[1:], strict=True):
        differences = warnings(first, other)
        cases = _matched(read_cases(first), read_cases(other), (files[0], path))
        for a, b in cases:
            if only := len(a.own.keys() ^ b.own.keys()):
                differences.append(f"{a.name}: {only} figures are in one of the files only")
            if a.described != b.described:
                differences.append(f"workload {a.name}: other lengths, numbers or load")
        if differences:
            console.print(f"{files[0]} and {path} differ in more than what was measured:")
            for line in differences:
                console.print(f"  {line}", markup=False)
        told: list[dict[str, Any]] = []
        for a, b in cases:
            found, paired = compare_cases(a, b)
            print_table(console, _table(a, b, found, paired, (str(files[0]), str(path))))
            more, judged = regressions(a, found, fail_above or 0.0)
            worse += more
            num_judged += judged
            told.append(
                {"name": a.name, "paired": paired, "comparisons": [one.to_dict() for one in found]}
            )
        described.append({"file": str(path), "differences": differences, "cases": told})
    if json_path is not None:
        result = {"schema": "vmserve-bench-compare", "schema_version": 1, "first": str(files[0])}
        write_text(json_path, dump({**result, "others": described}))
    if fail_above is None:
        return
    if not num_judged:
        raise ConfigurationError(
            f"--fail-above: no headline metric has an interval; give files with {MIN_PAIRS} rounds "
            "of the same seeds, or the same requests"
        )
    for line in worse:
        console.print(f"worse by more than {fail_above:g} %: {line}", markup=False)
    if worse:
        raise typer.Exit(1)
