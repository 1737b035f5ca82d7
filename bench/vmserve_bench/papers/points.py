"""Data of a figure: named cases, each metric once per round."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from vmserve_bench.ab.metrics import Metric
from vmserve_bench.lab.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["METRICS", "Points"]

_ALL = (
    Metric("requests_per_s", "requests/s", "rate", "higher"),
    Metric("tokens_per_s", "tokens/s", "rate", "higher"),
    Metric("normalized_s", "normalized latency (a token)", "s", "lower"),
    Metric("e2e_p50_s", "end to end p50", "s", "lower"),
    Metric("e2e_p90_s", "end to end p90", "s", "lower"),
    Metric("at_once", "requests at once", "count"),
    Metric("at_once_paper", "at once at the paper's rate", "count"),
    Metric("states_share", "of the pool, holding tokens", "share", "higher"),
    Metric("preemptions", "preemptions", "count", "lower"),
    Metric("swaps", "swapped out", "count", "lower"),
    Metric("victim_s", "for a victim of 256 tokens", "s", "lower"),
    Metric("step_p50_s", "step p50", "s", "lower"),
    Metric("step_p99_s", "step p99", "s", "lower"),
    Metric("step_max_s", "step, longest", "s", "lower"),
    Metric("calls_unhidden", "driver calls waited for", "count", "lower"),
    Metric("kv_bytes_per_s", "new KV memory, bytes/s", "rate"),
    Metric("prefix_hit_rate", "prefix cache hits", "share", "higher"),
)
#: Metrics by name, in the order in which they are shown.
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ALL}


class Points:
    """Values of each round by case and metric. ``more``: what else a figure's data says."""

    def __init__(self, cases: Iterable[str] = (), **more: float) -> None:
        self.cases: dict[str, dict[str, list[float]]] = {case: {} for case in cases}
        self.more = more

    def add(self, case: str, **metrics: float) -> None:
        for name, value in metrics.items():
            self.cases.setdefault(case, {}).setdefault(name, []).append(float(value))

    def cell(self, case: str, metric: str) -> str:
        """The median of the rounds, and their range where there are several that differ."""
        values, show = self.cases[case].get(metric), METRICS[metric].format
        if values is None:
            return "-"
        text, low, high = map(show, (statistics.median(values), min(values), max(values)))
        return text if low == high else f"{text} ({low} to {high})"

    def over(self, case: str, last: str, metric: str) -> str:
        """Ratio of medians: the case over that which begins alike and ends with ``last``."""
        [other] = (c for c in self.cases if c.endswith(last) and case.startswith(c[: -len(last)]))
        value, below = (statistics.median(self.cases[name][metric]) for name in (case, other))
        return f"{value / below:.2f}" if below else "-"

    def table(
        self, title: str, metrics: Sequence[str], over: Sequence[str] = (), note: str = ""
    ) -> Table:
        """A line for each case; ratios of the first metric over each of ``over``."""
        lines = tuple(
            (
                case,
                *(self.cell(case, metric) for metric in metrics),
                *(self.over(case, last, metrics[0]) for last in over),
            )
            for case in self.cases
        )
        titles = (METRICS[metric].title for metric in metrics)
        return Table(title, ("", *titles, *(f"over {last}" for last in over)), lines, note)
