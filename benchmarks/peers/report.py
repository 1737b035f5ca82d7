"""The results as text.

python report.py RESULTS.json ...    (the ratios of all of them, as a README's tables)
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from summary import MEMORY, METRICS, MIN_REPEATS, Metric, medians
from vmserve_bench.lab.table import markdown_table

Json = dict[str, Any]

#: From so many repeats on an interval is narrower than the range of what was seen.
NUM_FOR_TAILS = 6


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
    ]
    told = [f"- {name}: {text}" for name, text in computes_in(results)]
    lines += ["", "Computes in (servers: by the arguments in the JSON file):", "", *told] * bool(
        told
    )
    for model, values in results["values"].items():
        lines += ["", f"## Model {model}", "", traffic_line(results["workloads"][model]), ""]
        lines += measured_table(values)
        lines += kept_up(values)
        lines += memory_table(values)
        lines += offline_table(results.get("offline", {}).get(model, {}))
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
            for name, value in facts.get("settings", {}).items():
                told += f"; {name.replace('_', ' ')} {value}"
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


def present(
    values: Mapping[str, Mapping[str, Any]], metrics: Sequence[Metric] = METRICS
) -> list[Metric]:
    """Metrics that any engine has."""
    return [m for m in metrics if any(m.name in each for each in values.values())]


def measured_table(
    values: Mapping[str, Any], among: Sequence[Metric] = METRICS, first: str = "engine"
) -> list[str]:
    metrics = present(values, among)
    titles = (f"{m.title}, {m.unit}" if among is METRICS else m.title for m in metrics)
    rows = (
        [subject, *(shown(m, middle.get(m.name)) for m in metrics)]
        for subject, middle in medians(values).items()
    )
    return markdown_table([first, *titles], rows)


def kept_up(values: Mapping[str, Any]) -> list[str]:
    """Requests unfinished when the last one came: the sign of a queue."""
    left = {
        subject: middle["served_unfinished"]
        for subject, middle in medians(values).items()
        if "served_unfinished" in middle
    }
    if not left:
        return []
    told = ", ".join(f"{subject} {count:.0f}" for subject, count in left.items())
    return [
        "",
        f"Requests unfinished when the last one arrived (many: it did not keep up): {told}.",
    ]


def memory_table(values: Mapping[str, Any]) -> list[str]:
    if not present(values, MEMORY):
        return []
    return ["", *measured_table(values, MEMORY, "PSS, MiB, peak while")]


def offline_table(found: Mapping[str, Any]) -> list[str]:
    """Table of the offline workload: range, busy cores, memory."""
    if not found.get("rows"):
        return []

    def mebibytes(size: int | None) -> str:
        return "n/a" if size is None else f"{size / 2**20:.0f}"

    head = ("offline", "output tokens/s", "range", "busy cores", "load, s")
    head += ("PSS loaded, MiB", "PSS peak, MiB", "RSS peak, MiB")
    rows = []
    for row in found["rows"]:
        rates = row["tokens_per_s"]
        memory = (row[f"{each}_bytes"] for each in ("loaded_pss", "peak_pss", "peak_rss"))
        cells = (f"{statistics.median(rates):.1f}", f"{min(rates):.1f} to {max(rates):.1f}")
        cells += (f"{row['median_busy_cores']:.2f}", f"{row['median_load_s']:.1f}")
        rows.append([row["subject"], *cells, *map(mebibytes, memory)])
    used = ", ".join(f"{use:.0%} in one of {n}" for n, use in found["static_batch_use"].items())
    return [
        "",
        *markdown_table(head, rows),
        "",
        f"Decode rows of a static batch that yield a requested token: {used}.",
    ]


def comparison_tables(comparisons: Sequence[Json]) -> list[str]:
    lines: list[str] = []
    for ours in dict.fromkeys(each["vmserve"] for each in comparisons):
        rows = [each for each in comparisons if each["vmserve"] == ours]
        metrics = present({each["peer"]: each["metrics"] for each in rows})
        lines += ["", f"How many times better {ours} is (above 1: ahead{interval(rows)}):", ""]
        cells = ([each["peer"], *ratios(each, metrics)] for each in rows)
        lines += markdown_table(["than", *(m.title for m in metrics)], cells)
    return lines


def interval(rows: Sequence[Json]) -> str:
    """Interval in brackets."""
    counts = [each["num_repeats"] for row in rows for each in row["metrics"].values()]
    most = max(counts, default=0)
    if most < MIN_REPEATS:
        return f"; {most} repeats: no interval" if most > 1 else "; one repeat: no interval"
    told = f"; [95 % interval: bootstrap over {most} repeats"
    # A resample of one repeat alone is then likelier than the tail that is cut off.
    return f"{told}, so few that it is about their range]" if most < NUM_FOR_TAILS else f"{told}]"


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


def ratios(comparison: Json, metrics: Sequence[Metric]) -> list[str]:
    return [times(comparison["metrics"].get(m.name)) for m in metrics]


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
    """List engines that are missing from tables, and why."""
    found = [f"- {each['name']}: {one_line(each['reason'])}" for each in results["absent"]]
    found += [
        f"- {run['subject']}, {run['model']}, repeat {run['repeat'] + 1}"
        f"{', server' if run.get('is_server') else ''}: {one_line(run['error'])}"
        for run in results["runs"]
        if "error" in run
    ]
    return ["", "## Not measured", "", *found] if found else []


def one_line(text: str) -> str:
    """The most telling line of an error, cut to fit, without this machine's directories."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line]
    line = (telling or lines or ["no reason given"])[-1]
    return re.sub(r"(/[\w.+-]+)+/", "", line)[:300]


def overview(results: Json) -> list[str]:
    """Rows of one file's comparisons: the factors by which vmserve is better."""
    rows = [(model, each) for model, found in results["comparisons"].items() for each in found]
    metrics = present({str(place): each["metrics"] for place, (_, each) in enumerate(rows)})
    cells = (
        [model, each["vmserve"].removeprefix("vmserve "), each["peer"], *ratios(each, metrics)]
        for model, each in rows
    )
    lines = markdown_table(["model", "variant", "than", *(m.title for m in metrics)], cells, 3)
    note = interval([each for _, each in rows]).removeprefix("; ")
    return [f"Above 1: vmserve is ahead; {note}.", "", *lines]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        read = json.loads(Path(name).read_text(encoding="utf-8"))
        print(f"\n{Path(name).name}, {read['date']}\n", *overview(read), sep="\n")
