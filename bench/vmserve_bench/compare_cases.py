"""Input of ``vmserve bench compare``: results files as named columns of numbers.

A case of rounds (bench ab, bench serve) has metrics of its rounds and requests. A case of rows
(the other commands) is a section of a file: each of its columns is one figure of one row, with its
repeats where the file has them, and one value where it has not.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from vmserve.errors import ConfigurationError
from vmserve_bench.ab.metrics import METRICS, Metric
from vmserve_bench.papers.points import METRICS as POINT_METRICS

__all__ = ["SCHEMAS", "Case", "read", "read_cases"]

#: By schema, the command that writes it and the newest version, of which older ones are a part.
SCHEMAS: Mapping[str, tuple[str, int]] = {
    "vmserve-bench-ab": ("bench ab", 1),
    "vmserve-bench-serve": ("bench serve", 1),
    "vmserve-bench-startup": ("bench startup", 2),
    "vmserve-bench-step": ("bench step", 1),
    "vmserve-bench-kernels": ("bench kernels", 1),
    "vmserve-bench-alloc": ("bench alloc", 1),
    "vmserve-bench-sharing": ("bench sharing", 1),
    "vmserve-bench-papers": ("bench papers --engine real", 1),
    "vmserve-bench-papers-simulated": ("bench papers", 1),
}
#: Benchmarks whose files were written before files named their schema; they are like version 1.
_UNNAMED = ("step", "kernels", "alloc", "sharing", "papers, simulated")

Json: TypeAlias = Mapping[str, Any]
#: One figure of a row: the row's name, what it is, and its repeats or its one value.
Figure: TypeAlias = tuple[str, Metric, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Case:
    """One workload through one variant or server. ``columns`` have a value per round.

    ``requests``: raw samples by (round, request).
    """

    name: str
    columns: Mapping[str, Sequence[float | None]]
    seeds: tuple[int, ...] = ()
    described: Json = field(default_factory=dict)
    requests: Mapping[tuple[int, int], Json] = field(default_factory=dict)
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
    what = found.get("schema") or found.get("benchmark")
    if "schema" not in found and what in _UNNAMED and found.keys() & {"sections", "figures"}:
        schema = f"vmserve-bench-{what.replace(', ', '-')}"
        found = {**found, "schema": schema, "schema_version": 1}
    if str(found.get("schema")) not in SCHEMAS or "machine" not in found:
        *commands, last = (command for command, _ in SCHEMAS.values())
        raise ConfigurationError(
            f"{path} is no results file that can be compared"
            + (f" (it is of {what})" if isinstance(what, str) else "")
            + f": give those of {', '.join(commands)} or {last}"
        )
    _, newest = SCHEMAS[found["schema"]]
    if found.get("schema_version") not in range(1, newest + 1):
        raise ConfigurationError(
            f"{path} has version {found.get('schema_version')} of its schema, and "
            f"{newest} is read here: measure again with this version of vmserve"
        )
    return found


def read_cases(document: Json) -> list[Case]:
    """Cases of a document, by workload and variant, or by section."""
    command = document["schema"].removeprefix("vmserve-bench-")
    if command == "startup":
        phases = document["phases"]
        columns = {name: list(one["seconds"]) for name, one in phases.items()}
        own = {name: _less(one["title"]) for name, one in phases.items()}
        return [Case("startup", columns, own=own)]
    if command == "serve":
        runs = [(one["seed"], one["metrics"], one["run"]) for one in document["rounds"]]
        return [_case(document["workload"]["name"], document["workload"], runs)]
    if command == "ab":
        cases = []
        for workload in document["workloads"]:
            for name in (one["name"] for one in document["variants"]):
                rounds = workload["rounds"]
                runs = [(one["seed"], one["metrics"][name], one["runs"][name]) for one in rounds]
                cases.append(_case(f"{workload['name']}, {name}", workload, runs))
        return cases
    cases = []
    for section, data in (document.get("sections") or document.get("figures") or {}).items():
        columns, own = {}, {}
        for row, metric, values in _figures(command, section, data):
            name = f"{row}|{metric.name}"
            columns[name] = list(values)
            title = f"{row}: {metric.title}"
            own[name] = dataclasses.replace(metric, title=title, is_headline=True)
        if own:
            cases.append(Case(f"{command}, {section}", columns, own=own))
    return cases


def _case(name: str, workload: Json, runs: Sequence[tuple[int, Json, Json]]) -> Case:
    return Case(
        name,
        {metric: [metrics.get(metric) for _, metrics, _ in runs] for metric in METRICS},
        tuple(seed for seed, _, _ in runs),
        {**workload["described"], **workload["load"]},
        {(seed, request["index"]): request for seed, _, run in runs for request in run["requests"]},
    )


def _less(title: str) -> Metric:
    return Metric(title, title, "s", "lower", True)


def _more(title: str, unit: Literal["rate", "share"] = "rate") -> Metric:
    return Metric(title, title, unit, "higher", True)


def _figures(command: str, section: str, data: Json) -> Iterable[Figure]:
    if command == "kernels":
        return _products(data) if section == "products" else _kernels(data)
    if command == "papers":
        return _points(data)
    if command == "papers-simulated":
        return _simulated(section, data)
    read_section = _SECTIONS.get((command, section))
    return () if read_section is None else read_section(data)


def _step(data: Json) -> Iterator[Figure]:
    for row in data["rows"]:
        name = f"{row['num_seqs']:,} sequences, {row['regime']}"
        yield name, _less("beside the model"), [row["overhead_ns"]["median"] / 1e9]
        yield name, _less("p95 of that"), [row["overhead_ns"]["p95"] / 1e9]
        yield name, _less("whole step"), [row["parts_ns"]["step"]["median"] / 1e9]


def _kernels(data: Json) -> Iterator[Figure]:
    for point in data.get("points", ()):
        name = (
            f"{point['shape']} {point['dtype']}, {point['num_seqs']} x {point['context']:,}"
            f" + {point['num_new']:,}"
        )
        for way, samples in point["samples_ns"].items():
            yield name, _less(way), [sample / (1e9 * point["num_layers"]) for sample in samples]


def _products(data: Json) -> Iterator[Figure]:
    for point in data["points"]:
        for way, samples in point["samples_ns"].items():
            yield f"{point['form']} weights", _less(way), [sample / 1e9 for sample in samples]


def _calls(data: Json) -> Iterator[Figure]:
    for call in data["calls"]:
        name = f"{call['operation']}, {call['num_pages']:,} x {call['page_bytes']:,} bytes"
        yield name, _less("call"), [call["median_ns"] / 1e9]


def _alloc_steps(data: Json) -> Iterator[Figure]:
    for case, found in data["cases"].items():
        for way, one in found["ways"].items():
            for what in ("median", "p99"):
                yield f"{case}, {way}", _less(f"step {what}"), [one["step_ns"][what] / 1e9]


def _prefill(data: Json) -> Iterator[Figure]:
    for prompt in data["prompts"]:
        name = f"{prompt['prompt_tokens']:,} tokens, {prompt['state']}"
        yield name, _less("until writable"), [prompt["median_ns"] / 1e9]


def _bandwidth(data: Json) -> Iterator[Figure]:
    for size in data["page_sizes"]:
        for way, value in size["gb_per_s"].items():
            yield f"pages of {size['page_bytes']:,} bytes", _more(f"{way}, GB/s"), [value]


def _batch(data: Json) -> Iterator[Figure]:
    for one in data["variants"]:
        name = f"{one['view']}, pages of {one['page_tokens']:,} tokens"
        yield name, _more("requests at once"), [one["replay"]["mean_batch"]]


def _waste(data: Json) -> Iterator[Figure]:
    for trace, found in data["traces"].items():
        for one in found["systems"]:
            name = f"{trace}, {one['system']}"
            yield name, _more("token states", "share"), [one["states_percent_of_pool"] / 100]


def _bookkeeping(data: Json) -> Iterator[Figure]:
    for row in data["rows"]:
        name = f"{row['num_seqs']:,} sequences, {row['regime']}"
        yield name, _less("plan and apply"), [row["plan_apply_ns"]["median"] / 1e9]


def _shared_blocks(data: Json) -> Iterator[Figure]:
    for run in data["runs"]:
        for size in run["sizes"]:
            name = f"{run['workload']}, {run['method']} {run['width']}"
            title = f"saved in blocks of {size['block_tokens']}"
            yield name, _more(title, "share"), [size["saved_percent"] / 100]


def _shared_prefixes(data: Json) -> Iterator[Figure]:
    for case in data["cases"]:
        name = f"{case['regime']}, {case['shots']}, {case['mode']}"
        for side, title in (("a", "with the cache"), ("b", "without")):
            yield name, _less(title), [each / 1e9 for each in case["paired"][f"times_ns_{side}"]]


#: What reads a section, by the command and the section.
_SECTIONS: Mapping[tuple[str, str], Callable[[Json], Iterator[Figure]]] = {
    ("step", "step"): _step,
    ("alloc", "calls"): _calls,
    ("alloc", "steps"): _alloc_steps,
    ("alloc", "prefill"): _prefill,
    ("alloc", "bandwidth"): _bandwidth,
    ("alloc", "batch"): _batch,
    ("alloc", "waste"): _waste,
    ("alloc", "bookkeeping"): _bookkeeping,
    ("sharing", "blocks"): _shared_blocks,
    ("sharing", "prefix"): _shared_prefixes,
}


def _points(data: Json) -> Iterator[Figure]:
    for case, metrics in data.get("cases", {}).items():
        for name, values in metrics.items():
            yield case, POINT_METRICS[name], values
    yield from _kernels(data.get("kernel", {}))
    if "runs" in data:
        yield from _shared_blocks(data)


def _simulated(section: str, data: Json) -> Iterator[Figure]:
    for row, systems in data.items():
        for system, one in systems.items():
            if not isinstance(one, Mapping):
                continue
            name = f"{row}, {system}"
            if "sustained_requests_per_second" in one:
                value = one["sustained_requests_per_second"]
                yield name, _more("sustained requests/s"), [value]
            if "saturated" in one:
                yield name, _more("requests at once, saturated"), [one["saturated"]]
            if section == "19":
                yield name, _less("normalized latency"), [one["normalized_latency"]]
