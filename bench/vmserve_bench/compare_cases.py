"""Input of ``vmserve bench compare``: results files as named columns of numbers.

A case of rounds (bench ab, bench serve) has metrics of its rounds and requests. A case of rows
(the other commands) is a section of a file: each of its columns is one figure of one row, with its
repeats where the file has them, and one value where it has not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vmserve.errors import ConfigurationError
from vmserve_bench.ab.metrics import METRICS, Metric
from vmserve_bench.papers.points import METRICS as POINT_METRICS

__all__ = ["SCHEMAS", "Case", "read", "read_cases"]


class _Schema(NamedTuple):
    """``command`` writes it; ``version`` is the newest, of which older ones are a part."""

    command: str
    version: int = 1


SCHEMAS: Mapping[str, _Schema] = {
    "vmserve-bench-ab": _Schema("bench ab"),
    "vmserve-bench-serve": _Schema("bench serve"),
    "vmserve-bench-startup": _Schema("bench startup", 2),
    "vmserve-bench-step": _Schema("bench step"),
    "vmserve-bench-kernels": _Schema("bench kernels"),
    "vmserve-bench-alloc": _Schema("bench alloc"),
    "vmserve-bench-sharing": _Schema("bench sharing"),
    "vmserve-bench-papers": _Schema("bench papers --engine real"),
    "vmserve-bench-papers-simulated": _Schema("bench papers"),
}
#: Cases whose files were written before files named their schema; they are like version 1.
_UNNAMED = {
    "step": "vmserve-bench-step",
    "kernels": "vmserve-bench-kernels",
    "alloc": "vmserve-bench-alloc",
    "sharing": "vmserve-bench-sharing",
    "papers, simulated": "vmserve-bench-papers-simulated",
}


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
    #: Metrics that :data:`METRICS` does not have, by column. Columns with the same text before the
    #: last ``|`` are judged together.
    own: Mapping[str, Metric] = field(default_factory=dict)


def read(path: Path) -> dict[str, Any]:
    """Raises ConfigurationError for a file that is no results file of a known version."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        found = {}
    found = _named(found)
    known = SCHEMAS.get(str(found.get("schema")))
    if known is None or "machine" not in found:
        what = found.get("schema") or found.get("benchmark")
        commands = [schema.command for schema in SCHEMAS.values()]
        raise ConfigurationError(
            f"{path} is no results file that can be compared"
            + (f" (it is of {what})" if isinstance(what, str) else "")
            + f": give those of {', '.join(commands[:-1])} or {commands[-1]}"
        )
    if found.get("schema_version") not in range(1, known.version + 1):
        raise ConfigurationError(
            f"{path} has version {found.get('schema_version')} of its schema, and "
            f"{known.version} is read here: measure again with this version of vmserve"
        )
    return found


def _named(found: dict[str, Any]) -> dict[str, Any]:
    """Add the schema that older files lack."""
    benchmark = found.get("benchmark")
    if "schema" in found or not isinstance(benchmark, str) or benchmark not in _UNNAMED:
        return found
    if not ("sections" in found or "figures" in found):
        return found
    return {**found, "schema": _UNNAMED[benchmark], "schema_version": 1}


def read_cases(document: Mapping[str, Any]) -> list[Case]:
    """Cases of a document, by workload and variant."""
    if document["schema"] == "vmserve-bench-startup":
        phases = document["phases"]
        columns = {name: list(one["seconds"]) for name, one in phases.items()}
        own = {name: Metric(name, one["title"], "s", "lower", True) for name, one in phases.items()}
        count = len(next(iter(columns.values())))
        return [Case("startup", columns, tuple(range(count)), own=own)]
    if document["schema"] == "vmserve-bench-serve":
        runs = [(one["seed"], one["metrics"], one["run"]) for one in document["rounds"]]
        workload = document["workload"]
        return [_case(workload["name"], {**workload["described"], **workload["load"]}, runs)]
    if document["schema"] != "vmserve-bench-ab":
        return _row_cases(document)
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


class _Figure(NamedTuple):
    """One figure of a row: ``metric`` of ``row``, its repeats or its one value."""

    row: str
    metric: Metric
    values: Sequence[float]


def _seconds(title: str) -> Metric:
    return Metric(title, title, "s", "lower", True)


def _rate(title: str) -> Metric:
    return Metric(title, title, "rate", "higher", True)


def _share(title: str) -> Metric:
    return Metric(title, title, "share", "higher", True)


def _row_cases(document: Mapping[str, Any]) -> list[Case]:
    """A case for each section that is there and has rows."""
    sections = document.get("sections") or document.get("figures") or {}
    command = str(document["schema"]).removeprefix("vmserve-bench-")
    cases = []
    for section, data in sections.items():
        figures = list(_figures(command, section, data))
        names = [f"{one.row}|{one.metric.name}" for one in figures]
        cases.append(
            Case(
                f"{command}, {section}",
                {name: list(one.values) for name, one in zip(names, figures, strict=True)},
                (),
                own={name: _of_row(one) for name, one in zip(names, figures, strict=True)},
            )
        )
    return [case for case in cases if case.own]


def _of_row(figure: _Figure) -> Metric:
    metric = figure.metric
    return Metric(metric.name, f"{figure.row}: {metric.title}", metric.unit, metric.better, True)


def _figures(command: str, section: str, data: Mapping[str, Any]) -> Iterator[_Figure]:
    if command == "step":
        return _step_figures(data)
    if command == "kernels":
        return _kernel_figures(data)
    if command == "alloc":
        return _alloc_figures(section, data)
    if command == "sharing":
        return _sharing_figures(section, data)
    if command == "papers":
        return _point_figures(data)
    return _simulated_figures(section, data)


def _step_figures(data: Mapping[str, Any]) -> Iterator[_Figure]:
    for row in data["rows"]:
        name = f"{row['num_seqs']:,} sequences, {row['regime']}"
        yield _Figure(name, _seconds("beside the model"), [row["overhead_ns"]["median"] / 1e9])
        yield _Figure(name, _seconds("p95 of that"), [row["overhead_ns"]["p95"] / 1e9])
        yield _Figure(name, _seconds("whole step"), [row["parts_ns"]["step"]["median"] / 1e9])


def _kernel_figures(data: Mapping[str, Any]) -> Iterator[_Figure]:
    for point in data.get("points", ()):
        name = (
            f"{point['shape']} {point['dtype']}, {point['num_seqs']} x {point['context']:,}"
            f" + {point['num_new']:,}"
        )
        for way, samples in point["samples_ns"].items():
            layers = 1e9 * point["num_layers"]
            yield _Figure(name, _seconds(way), [sample / layers for sample in samples])


def _alloc_figures(section: str, data: Mapping[str, Any]) -> Iterator[_Figure]:
    if section == "calls":
        for call in data["calls"]:
            name = f"{call['operation']}, {call['num_pages']:,} x {call['page_bytes']:,} bytes"
            yield _Figure(name, _seconds("call"), [call["median_ns"] / 1e9])
    elif section == "steps":
        for case, found in data["cases"].items():
            for way, one in found["ways"].items():
                for what in ("median", "p99"):
                    value = one["step_ns"][what] / 1e9
                    yield _Figure(f"{case}, {way}", _seconds(f"step {what}"), [value])
    elif section == "prefill":
        for prompt in data["prompts"]:
            name = f"{prompt['prompt_tokens']:,} tokens, {prompt['state']}"
            yield _Figure(name, _seconds("until writable"), [prompt["median_ns"] / 1e9])
    elif section == "bandwidth":
        for size in data["page_sizes"]:
            for way, value in size["gb_per_s"].items():
                yield _Figure(
                    f"pages of {size['page_bytes']:,} bytes", _rate(f"{way}, GB/s"), [value]
                )
    elif section == "batch":
        for one in data["variants"]:
            name = f"{one['view']}, pages of {one['page_tokens']:,} tokens"
            yield _Figure(name, _rate("requests at once"), [one["replay"]["mean_batch"]])
    elif section == "waste":
        for trace, found in data["traces"].items():
            for one in found["systems"]:
                value = one["states_percent_of_pool"] / 100
                yield _Figure(f"{trace}, {one['system']}", _share("token states"), [value])
    elif section == "bookkeeping":
        for row in data["rows"]:
            name = f"{row['num_seqs']:,} sequences, {row['regime']}"
            yield _Figure(name, _seconds("plan and apply"), [row["plan_apply_ns"]["median"] / 1e9])


def _sharing_figures(section: str, data: Mapping[str, Any]) -> Iterator[_Figure]:
    if section == "blocks":
        for run in data["runs"]:
            for size in run["sizes"]:
                name = f"{run['workload']}, {run['method']} {run['width']}"
                metric = _share(f"saved in blocks of {size['block_tokens']}")
                yield _Figure(name, metric, [size["saved_percent"] / 100])
    elif section == "prefix":
        for case in data["cases"]:
            name = f"{case['regime']}, {case['shots']}, {case['mode']}"
            for side, title in (("a", "with the cache"), ("b", "without")):
                times = [nanoseconds / 1e9 for nanoseconds in case["paired"][f"times_ns_{side}"]]
                yield _Figure(name, _seconds(title), times)


def _point_figures(data: Mapping[str, Any]) -> Iterator[_Figure]:
    for case, metrics in data.get("cases", {}).items():
        for name, values in metrics.items():
            yield _Figure(case, POINT_METRICS[name], values)
    yield from _kernel_figures(data.get("kernel", {}))
    if "runs" in data:
        yield from _sharing_figures("blocks", data)


def _simulated_figures(section: str, data: Mapping[str, Any]) -> Iterator[_Figure]:
    for row, systems in data.items():
        for system, one in systems.items():
            if not isinstance(one, Mapping):
                continue
            name = f"{row}, {system}"
            if "sustained_requests_per_second" in one:
                value = one["sustained_requests_per_second"]
                yield _Figure(name, _rate("sustained requests/s"), [value])
            if "saturated" in one:
                yield _Figure(name, _rate("requests at once, saturated"), [one["saturated"]])
            if section == "19":
                latency = one["normalized_latency"]
                yield _Figure(name, _seconds("normalized latency"), [latency])
