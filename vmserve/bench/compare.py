"""``vmserve bench compare``: is the second results file better or worse than the first?

Rounds are paired by their place where both files have as many of the same seeds: each pair served
the same requests. With fewer rounds than an interval takes, requests are paired instead. Runs of
two files lie apart in time, so that what the machine did meanwhile is part of every ratio.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from vmserve.bench.ab.metrics import METRICS, Metric, headline_names
from vmserve.bench.ab.results import format_effect, judgement, median
from vmserve.bench.ab.statistics import MIN_PAIRS, Comparison, compare_metrics
from vmserve.bench.alloc.section import Table
from vmserve.bench.report import dump, make_console, make_directory, print_table
from vmserve.errors import ConfigurationError

__all__ = ["Case", "compare_cases", "compare_command", "read_cases", "regressions"]

#: Schemas that are read, and the newest version of each.
_VERSIONS = {"vmserve-bench-ab": 1, "vmserve-bench-serve": 1, "vmserve-bench-startup": 1}
#: What makes two requests of equal place the same request.
_SAME = ("input_tokens", "output_tokens", "sequences")
_MACHINE = ("cpu", "num_usable_cores", "memory_bytes", "python", "git_revision")


@dataclass(frozen=True, slots=True)
class Case:
    """One workload through one variant or server. ``columns`` have a value per round.

    ``requests``: raw samples by (round, request).
    """

    name: str
    columns: Mapping[str, Sequence[float | None]]
    seeds: tuple[int, ...]
    described: Mapping[str, Any] = field(default_factory=dict)
    requests: Mapping[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)
    #: Titles of the metrics that :data:`METRICS` does not have; all of them seconds, less better.
    titles: Mapping[str, str] = field(default_factory=dict)


def read(path: Path) -> dict[str, Any]:
    """Raises ConfigurationError for a file that is no results file of a known version."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path} is no JSON: {error}") from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema not in _VERSIONS:
        raise ConfigurationError(
            f"{path} is no results file that can be compared: give those of bench ab, bench serve "
            "or bench startup"
        )
    if found.get("schema_version") != _VERSIONS[schema]:
        raise ConfigurationError(
            f"{path} has version {found.get('schema_version')} of its schema, and "
            f"{_VERSIONS[schema]} is read here: measure again with this version of vmserve"
        )
    return dict(found)


def read_cases(document: Mapping[str, Any]) -> list[Case]:
    """What was measured, by workload and variant."""
    if document["schema"] == "vmserve-bench-startup":
        phases = document["phases"]
        columns = {name: list(one["seconds"]) for name, one in phases.items()}
        titles = {name: one["title"] for name, one in phases.items()}
        count = len(next(iter(columns.values())))
        return [Case("startup", columns, tuple(range(count)), titles=titles)]
    if document["schema"] == "vmserve-bench-serve":
        runs = [(one["seed"], one["metrics"], one["run"]) for one in document["rounds"]]
        workload = document["workload"]
        return [_case(workload["name"], {**workload["described"], **workload["load"]}, runs)]
    cases = []
    for workload in document["workloads"]:
        for name in (one["name"] for one in document["variants"]):
            runs = [
                (one["seed"], one["metrics"][name], one["runs"][name]) for one in workload["rounds"]
            ]
            described = {**workload["described"], **workload["load"]}
            cases.append(_case(f"{workload['name']}, {name}", described, runs))
    return cases


def _case(
    name: str,
    described: Mapping[str, Any],
    runs: Sequence[tuple[int, Mapping[str, Any], Mapping[str, Any]]],
) -> Case:
    return Case(
        name,
        {metric: [metrics.get(metric) for _, metrics, _ in runs] for metric in METRICS},
        tuple(seed for seed, _, _ in runs),
        described,
        {(seed, request["index"]): request for seed, _, run in runs for request in run["requests"]},
    )


def compare_cases(first: Case, other: Case) -> tuple[list[Comparison], str]:
    """Comparisons, and what was paired: "rounds", "requests" or "" where nothing could be."""
    if first.titles:
        count = min(len(first.seeds), len(other.seeds))
        return compare_metrics(
            {name: values[:count] for name, values in first.columns.items()},
            {name: values[:count] for name, values in other.columns.items()},
            list(first.titles),
        ), "repeats"
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
    left, right = (_latencies([pair[side] for pair in pairs]) for side in range(2))
    # Per token has fewer values than the others, which all rows of one call must share.
    found = [
        one
        for name in left
        for one in compare_metrics({name: left[name]}, {name: right[name]}, [name])
    ]
    return found, "requests"


def _latencies(requests: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    return {
        "ttft": [request["ttft_us"] / 1e6 for request in requests],
        "tpot": [_tpot(request) for request in requests if request["output_tokens"] > 1],
        "e2e": [request["e2e_us"] / 1e6 for request in requests],
    }


def _tpot(request: Mapping[str, Any]) -> float:
    after_first_s = (request["e2e_us"] - request["ttft_us"]) / 1e6
    return float(after_first_s / (request["output_tokens"] - 1))


_REQUEST_TITLES = {"ttft": "TTFT of a request", "tpot": "TPOT of a request", "e2e": "end to end"}


def metric_of(case: Case, name: str) -> Metric:
    """The metric behind a name of :func:`compare_cases`."""
    if name in case.titles:
        return Metric(name, case.titles[name], "s", "lower", True)
    if name in _REQUEST_TITLES:
        return Metric(name, _REQUEST_TITLES[name], "s", "lower", True)
    return METRICS[name]


def regressions(
    case: Case, comparisons: Sequence[Comparison], percent: float
) -> tuple[list[str], int]:
    """Headlines that are surely worse by more than ``percent``; how many had an interval."""
    worse, judged = [], 0
    for one in comparisons:
        metric, effect = metric_of(case, one.metric), one.effect
        if one.verdict is None or effect.low is None or effect.high is None:
            continue
        if metric.better is None:
            continue
        judged += 1
        is_worse = (
            effect.low > 1.0 + percent / 100.0
            if metric.better == "lower"
            else effect.high < 1.0 - percent / 100.0
        )
        if is_worse:
            worse.append(f"{case.name}: {metric.title} {format_effect(effect)}")
    return worse, judged


def warnings(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What differs between the files besides what was measured."""
    lines = []
    for name in _MACHINE:
        a, b = first["machine"].get(name), other["machine"].get(name)
        if a != b:
            lines.append(f"{name.replace('_', ' ')}: {a} and {b}")
    versions_a, versions_b = (one["machine"].get("packages", {}) for one in (first, other))
    lines += [
        f"{name}: {versions_a.get(name)} and {versions_b.get(name)}"
        for name in sorted(versions_a.keys() | versions_b.keys())
        if versions_a.get(name) != versions_b.get(name)
    ]
    failed = [
        sum(len(one.get("failures", ())) for one in found.get("rounds", ()))
        for found in (first, other)
    ]
    if any(failed):
        lines.append(f"failed requests, which no latency has: {failed[0]} and {failed[1]}")
    for section in ("options", "settings", "slo", "server"):
        a, b = first.get(section) or {}, other.get(section) or {}
        lines += [
            f"{section}, {name}: {a.get(name)} and {b.get(name)}"
            for name in sorted(a.keys() | b.keys())
            if a.get(name) != b.get(name)
        ]
    return lines


def _matched(
    first: Sequence[Case], other: Sequence[Case], paths: tuple[Path, Path]
) -> list[tuple[Case, Case]]:
    by_name = {case.name: case for case in other}
    found = [(case, by_name[case.name]) for case in first if case.name in by_name]
    if not found:
        told = " and ".join(
            f"{path} has {'; '.join(case.name for case in cases) or 'none'}"
            for path, cases in zip(paths, (first, other), strict=True)
        )
        raise ConfigurationError(f"no workload and variant is in both files: {told}")
    for a, b in found:
        if (a.described.get("is_open"), a.described.get("decoding")) != (
            b.described.get("is_open"),
            b.described.get("decoding"),
        ):
            raise ConfigurationError(
                f"{a.name}: the loads are of different kinds (open and closed loop, or decoding) "
                "in the two files, and their ratio would say nothing: measure both alike"
            )
    return found


def _table(
    a: Case, b: Case, found: Sequence[Comparison], paired: str, names: tuple[str, str]
) -> Table:
    effects = {one.metric: one for one in found}
    rows = []
    shown: list[str] = list(a.titles) or [name for name in METRICS if METRICS[name].is_headline]
    for name in [*shown, *(one for one in effects if one in _REQUEST_TITLES)]:
        metric = metric_of(a, name)
        left, right = (median(case.columns.get(name, ())) for case in (a, b))
        comparison = effects.get(name)
        if left is None and right is None and comparison is None:
            continue
        if comparison is not None:
            ratio, verdict = format_effect(comparison.effect), judgement(comparison, metric)
        else:
            ratio, verdict = f"{right / left:.3f}" if left and right else "-", ""
        rows.append((metric.title, metric.format(left), metric.format(right), ratio, verdict))
    note = {
        "rounds": "Rounds of the same requests in pairs, 99 % intervals.",
        "repeats": "99 % intervals where there are enough repeats.",
        "requests": f"Fewer than {MIN_PAIRS} rounds: latencies of the same requests in pairs, 99 % "
        "intervals. Requests of one run wait for each other, so that these are too narrow.",
        "": "Nothing could be paired: ratios of medians, without intervals.",
    }[paired]
    return Table(a.name, ("", *names, "ratio", "verdict"), tuple(rows), note)


def compare_command(
    files: Annotated[list[Path], typer.Argument(help="The first is what others are held against.")],
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the comparisons to this file.")
    ] = None,
    fail_above: Annotated[
        float | None,
        typer.Option(
            help="Exit status 1 where a headline metric is worse by more than so many percent, its "
            "whole interval included.",
            metavar="PERCENT",
        ),
    ] = None,
) -> None:
    """Compare results files of bench ab, bench serve or bench startup.

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
            f"these are results of different commands ({', '.join(sorted(schemas))}): an engine "
            "in the same process and a server over HTTP are not measured alike"
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
            if fail_above is not None:
                more, judged = regressions(a, found, fail_above)
                worse += more
                num_judged += judged
            told.append(
                {"name": a.name, "paired": paired, "comparisons": [one.to_dict() for one in found]}
            )
        described.append({"file": str(path), "differences": differences, "cases": told})
    if json_path is not None:
        make_directory(json_path.parent)
        result = {"schema": "vmserve-bench-compare", "schema_version": 1, "first": str(files[0])}
        json_path.write_text(dump({**result, "others": described}), encoding="utf-8")
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
