"""The results as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from summary import METRICS, Metric, medians

Json = dict[str, Any]


def markdown(results: Json) -> str:
    machine = results["machine"]
    extensions = ", ".join(machine["cpu_extensions"]) or "no vector extensions that matter here"
    lines = [
        f"# vmserve and its peers, {results['date']}",
        "",
        (
            f"{machine['cpu']} ({extensions}), {results['num_threads']} threads; vmserve at "
            f"revision {(machine['git_revision'] or 'unknown')[:12]}; medians of "
            f"{results['num_repeats']} interleaved repeats"
            f"{', a smoke run' if results['smoke'] else ''}."
        ),
        "",
        "Computes in:",
        "",
        *(f"- {name}: {text}" for name, text in computes_in(results)),
    ]
    for model, values in results["values"].items():
        lines += ["", f"## Model {model}", "", traffic_line(results["workloads"][model]), ""]
        lines += measured_table(values)
        lines += comparison_tables(results["comparisons"].get(model, []))
        lines += checks(results["checks"].get(model, {}))
    lines += problems(results)
    return "\n".join(lines) + "\n"


def computes_in(results: Json) -> list[tuple[str, str]]:
    found = {}
    for run in results["runs"]:
        facts = run.get("facts")
        if facts:
            told = facts["computes_in"]
            if "kv_cache" in facts:
                told += f"; KV cache {facts['kv_cache']}"
            found[run["subject"]] = told
    return list(found.items())


def traffic_line(workloads: Json) -> str:
    parts = [
        f"{name}: {each['num_requests']} requests, {each['num_input_tokens']} tokens in, "
        f"{each['num_output_tokens']} out"
        + (f", over {each['last_arrival_s']:.0f} s" if each["last_arrival_s"] else "")
        for name, each in workloads.items()
    ]
    return "; ".join(parts) + "."


def present(values: Mapping[str, Mapping[str, Any]]) -> list[Metric]:
    """The metrics that anybody has."""
    return [m for m in METRICS if any(m.name in each for each in values.values())]


def heading(first: str, metrics: Sequence[Metric], *, with_units: bool) -> list[str]:
    titles = [f"{m.title}, {m.unit}" if with_units else m.title for m in metrics]
    return ["| " + " | ".join([first, *titles]) + " |", "|---|" + "---:|" * len(metrics)]


def measured_table(values: Mapping[str, Any]) -> list[str]:
    metrics = present(values)
    lines = heading("engine", metrics, with_units=True)
    for subject, middle in medians(values).items():
        cells = [shown(m, middle.get(m.name)) for m in metrics]
        lines.append("| " + " | ".join([subject, *cells]) + " |")
    return lines


def comparison_tables(comparisons: Sequence[Json]) -> list[str]:
    lines: list[str] = []
    for ours in dict.fromkeys(each["vmserve"] for each in comparisons):
        rows = [each for each in comparisons if each["vmserve"] == ours]
        metrics = present({each["peer"]: each["metrics"] for each in rows})
        lines += ["", f"How many times better {ours} is (above 1: ahead; 95 % interval):", ""]
        lines += heading("than", metrics, with_units=False)
        for each in rows:
            cells = [times(each["metrics"].get(m.name)) for m in metrics]
            lines.append("| " + " | ".join([each["peer"], *cells]) + " |")
    return lines


def shown(metric: Metric, value: float | None) -> str:
    if value is None:
        return "-"
    scaled = value * metric.scale
    return f"{scaled:,.0f}" if scaled >= 1000 else f"{scaled:.3g}"


def times(result: Json | None) -> str:
    if result is None:
        return "-"
    text = f"{result['ratio']:.2f}"
    return text if result["low"] is None else f"{text} [{result['low']:.2f}, {result['high']:.2f}]"


def checks(found: Mapping[str, Json]) -> list[str]:
    if not found:
        return []
    lines = ["", "Tokens against transformers in float32, one request at a time:", ""]
    for name, each in found.items():
        text = f"- {name}: {each['num_identical']} of {each['num_requests']} requests identical"
        if each["max_margin"] is not None:
            text += f"; widest margin at a first difference {each['max_margin']:.2g} logits"
        lines.append(text)
    return lines


def problems(results: Json) -> list[str]:
    """Who is not in the tables, or not in all of them, and why."""
    found = [f"- {each['name']}: {one_line(each['reason'])}" for each in results["absent"]]
    found += [
        f"- {run['subject']}, {run['model']}, repeat {run['repeat'] + 1}"
        f"{', server' if run.get('is_server') else ''}: {one_line(run['error'])}"
        for run in results["runs"]
        if "error" in run
    ]
    return ["", "## Not measured", "", *found] if found else []


def one_line(text: str) -> str:
    """The line of an error that says most, cut to fit, without this machine's directories."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line]
    line = (telling or lines or ["no reason given"])[-1]
    return re.sub(r"(/[\w.+-]+)+/", "", line)[:300]
