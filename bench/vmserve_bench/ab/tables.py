"""Tables of what ``results.json`` has: of the terminal and of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vmserve_bench.ab.metrics import METRICS, judgement
from vmserve_bench.ab.search import HIGHEST, LOWEST, MAX_RATE
from vmserve_bench.lab.statistics import CONFIDENCE, MIN_PAIRS, median
from vmserve_bench.lab.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vmserve_bench.ab.metrics import Better

__all__ = ["effect_cells", "search_table", "sizes_of", "workload_table"]

Json = dict[str, Any]


def sizes_of(described: Mapping[str, Any]) -> str:
    """How many requests, how long, and how they come."""
    most = "at most " if described.get("may_end") else ""
    return (
        f"{described['num_requests']} requests, {described['mean_input_tokens']:.0f} tokens in and "
        f"{most}{described['mean_output_tokens']:.0f} out on average, {described['load']}"
    )


def effect_cells(comparison: Mapping[str, Any] | None, better: Better | None) -> tuple[str, str]:
    """A comparison's ratio with its interval, and the verdict in words."""
    if comparison is None:
        return "", ""
    text = f"{comparison['ratio']:.3f}"
    if comparison["low"] is not None:
        high = "∞" if comparison["high"] is None else f"{comparison['high']:.3f}"
        text += f" [{comparison['low']:.3f}, {high}]"
    return text, judgement(comparison["verdict"], better)


def workload_table(workload: Mapping[str, Any], *, everything: bool = False) -> Table:
    """Table of medians over rounds, and of every variant against the first."""
    rounds = workload["rounds"]
    first, *others = names = list(rounds[0]["metrics"])
    found = {(name, one["metric"]): one for name in others for one in workload["comparisons"][name]}
    rows = []
    for metric in METRICS.values():
        if not (everything or metric.is_headline or metric.is_usual):
            continue
        medians = [median([one["metrics"][name][metric.name] for one in rounds]) for name in names]
        if all(value is None for value in medians):
            continue
        row = [metric.title, metric.format(medians[0])]
        for name, value in zip(others, medians[1:], strict=True):
            comparison = found.get((name, metric.name))
            row += [metric.format(value), *effect_cells(comparison, metric.better)]
        rows.append(tuple(row))
    answers = [
        f"{name}: {one['same']} of {one['of']}" for name, one in workload["same_answers"].items()
    ]
    note = [
        f"Medians; ratios: geometric means of paired rounds with {CONFIDENCE:.0%} intervals.",
        f"Answers that are the first variant's to the token: {', '.join(answers)}.",
    ]
    if len(rounds) < MIN_PAIRS:
        note.append(
            f"No intervals and no verdicts: they take {MIN_PAIRS} rounds, these are {len(rounds)}."
        )
    return Table(
        f"{workload['name']}: {sizes_of(workload['described'])}, {len(rounds)} rounds",
        (
            "",
            first,
            *(title for name in others for title in (name, f"{name} / {first}", "verdict")),
        ),
        tuple(rows),
        " ".join(note),
    )


def search_table(search: Mapping[str, Any]) -> Table:
    """Table of the highest rate of each variant."""
    rows = []
    for name, rates in search[MAX_RATE].items():
        num_there = sum(rate is not None for rate in rates)
        middle = median(rates)
        rows.append(
            (
                name,
                "-" if middle is None else f"{middle:.3g}",
                f"{num_there} of {len(rates)}",
                *effect_cells(search["comparisons"].get(name), "higher"),
            )
        )
    low, high = (search["closed_loop_per_s"] * factor for factor in (LOWEST, HIGHEST))
    return Table(
        f"{search['name']}: highest rate with {search['goodput']:.0%} of requests in time",
        ("", "requests/s", "rounds that found it", f"/ {next(iter(search[MAX_RATE]))}", "verdict"),
        tuple(rows),
        f"Searched from {low:.3g} to {high:.3g} requests/s. A comparison needs every round.",
    )
