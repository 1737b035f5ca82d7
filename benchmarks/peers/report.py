"""The results as text and as a picture.

python report.py RESULTS.json ...    (the ratios of all of them, as a README's tables)
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from summary import METRICS, MIN_REPEATS, Metric

from vmserve_bench.lab.table import markdown_table

Json = dict[str, Any]

#: From so many repeats on an interval is narrower than the range of what was seen.
NUM_FOR_TAILS = 6


def markdown(results: Json) -> str:
    machine = results["machine"]
    extensions = ", ".join(machine["cpu_extensions"]) or "no vector extensions that matter here"
    where = f"{machine['cpu']} ({extensions}), {results['num_threads']} threads"
    revision = (machine["git_revision"] or "unknown")[:12]
    repeats = f"{results['num_repeats']} interleaved repeats"
    lines = [
        f"# vmserve and its peers, {results['date']}{', a smoke run' * results['smoke']}",
        "",
        f"{where}; vmserve at revision {revision}; medians of {repeats}, with their range.",
    ]
    facts = {run["subject"]: computes_in(run["facts"]) for run in results["runs"] if "facts" in run}
    if facts:
        lines += ["", "Computes in (servers: by the arguments in the JSON file):", ""]
        lines += [f"- {name}: {told}" for name, told in facts.items()]
    for model, values in results["values"].items():
        lines += ["", f"## Model {model}", ""]
        lines += [traffic(*each) for each in results["workloads"][model].items()]
        lines += ["", *measured_table(values)]
        if checks := results["checks"].get(model):
            lines += ["", "Tokens against transformers in float32, one request at a time:", ""]
            lines += [check_line(name, each) for name, each in checks.items()]
    lines += ["", *ratios(results)]
    absent = [(each["name"], each["reason"]) for each in results["absent"]]
    for run in results["runs"]:
        if "error" in run:
            server = ", server" if run.get("is_server") else ""
            what = f"{run['subject']}, {run['model']}, repeat {run['repeat'] + 1}{server}"
            absent.append((what, run["error"]))
    if absent:
        lines += ["", "## Not measured", ""]
        lines += [f"- {name}: {one_line(reason)}" for name, reason in absent]
    return "\n".join(lines) + "\n"


def computes_in(facts: Json) -> str:
    others = (f"{name.replace('_', ' ')} {value}" for name, value in facts.items()
              if name not in ("computes_in", "more"))  # fmt: skip
    return "; ".join([facts["computes_in"], *others])


def traffic(name: str, told: Json) -> str:
    text = f"- {name}: {told['num_requests']} requests, {told['num_input_tokens']} tokens in, "
    text += f"{told['num_output_tokens']} out"
    if told["last_arrival_s"]:
        text += f", over {told['last_arrival_s']:.0f} s"
    if name == "offline":
        use = (f"{share:.0%} of {size}" for size, share in told["static_batch_use"].items())
        text += f"; rows of a static batch that yield a requested token: {', '.join(use)}"
    return text


def check_line(name: str, told: Json) -> str:
    text = f"- {name}: {told['num_identical']} of {told['num_requests']} requests identical"
    if told["max_margin"] is not None:
        text += f"; widest margin at a first difference {told['max_margin']:.2g} logits"
    return text


def present(values: Iterable[Mapping[str, Any]], compared: bool = True) -> list[Metric]:
    """Metrics that any of them has: all, or those that are compared."""
    found = set().union(*values)
    return [m for m in METRICS if m.name in found and (m.better or not compared)]


def measured_table(values: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """A row per metric, a column per engine."""

    def cell(metric: Metric, repeats: Mapping[str, float]) -> str:
        if not repeats:
            return "-"
        each = [value * metric.scale for value in repeats.values()]
        least, middle, most = (shown(f(each)) for f in (min, statistics.median, max))
        return middle if least == most else f"{middle} ({least} to {most})"

    rows = (
        [
            ", ".join(filter(None, (m.title, m.unit))),
            *(cell(m, each.get(m.name, {})) for each in values.values()),
        ]
        for m in present(values.values(), compared=False)
    )
    return markdown_table(["", *values], rows)


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def ratios(results: Json) -> list[str]:
    """How many times better vmserve is: a row per model, variant and peer."""
    rows = [(model, each) for model, found in results["comparisons"].items() for each in found]
    metrics = present(each["metrics"] for _, each in rows)
    cells = (
        [model, each["vmserve"].removeprefix("vmserve "), each["peer"]]
        + [times(each["metrics"].get(m.name)) for m in metrics]
        for model, each in rows
    )
    head = ["model", "variant", "than", *(m.title for m in metrics)]
    note = f"Above 1: vmserve is ahead; {interval([each for _, each in rows])}."
    return [note, "", *markdown_table(head, cells, 3)] if rows else []


def times(result: Json | None) -> str:
    if result is None:
        return "-"
    text = f"{result['ratio']:.2f}"
    return text if result["low"] is None else f"{text} [{result['low']:.2f}, {result['high']:.2f}]"


def interval(rows: Sequence[Json]) -> str:
    """What stands in brackets."""
    counts = [each["num_repeats"] for row in rows for each in row["metrics"].values()]
    most = max(counts, default=0)
    if most < MIN_REPEATS:
        return f"{most} repeats: no interval" if most > 1 else "one repeat: no interval"
    told = f"[95 % interval: bootstrap over {most} repeats"
    # A resample of one repeat alone is then likelier than the tail that is cut off.
    return f"{told}, so few that it is about their range]" if most < NUM_FOR_TAILS else f"{told}]"


def one_line(text: str) -> str:
    """The most telling line of an error, cut to fit, without this machine's directories."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line]
    line = (telling or lines or ["no reason given"])[-1]
    return re.sub(r"(/[\w.+-]+)+/", "", line)[:300]


def draw(results: Json, path: Path) -> None:
    """A row per model, a column per compared metric: bars of medians with the range."""
    # Late: its pages would count half in the memory of engines that load them too.
    from matplotlib.figure import Figure  # noqa: PLC0415

    columns = {model: present(each.values()) for model, each in results["values"].items()}
    shape = (len(columns), max(map(len, columns.values())))
    figure = Figure(figsize=(2.3 * shape[1] + 2.0, 3.0 * shape[0]), layout="constrained")
    grid = figure.subplots(*shape, squeeze=False)
    for (model, values), axes in zip(results["values"].items(), grid, strict=True):
        for metric, axis in itertools.zip_longest(columns[model], axes):
            if metric is None:
                axis.set_visible(False)
                continue
            for name, each in values.items():
                scaled = [value * metric.scale for value in each.get(metric.name, {}).values()]
                color = "#1f6f4a" if name.startswith("vmserve") else "#9aa5b1"
                axis.barh(name, statistics.median(scaled or [0.0]), color=color)
                axis.plot([min(scaled, default=0.0), max(scaled, default=0.0)], [name] * 2, "k-")
            title = f"{model}: {metric.title}\n{metric.unit}, {metric.better} is better"
            axis.set_title(title, fontsize=7)
            axis.tick_params(labelsize=6)
            axis.invert_yaxis()
    figure.savefig(path)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        read = json.loads(Path(name).read_text(encoding="utf-8"))
        where = name.removesuffix("/results.json").rpartition("/")[2]
        print(f"\n{where}, {read['date']}\n", *ratios(read), sep="\n")
