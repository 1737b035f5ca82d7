"""Data of a figure on the real engine: named cases, each metric once per round."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from vmserve_bench.ab.metrics import Metric

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vmserve_bench.lab.report import Report

__all__ = ["METRICS", "Points", "RealOptions", "shuffled"]

_T = TypeVar("_T")

_ALL = (
    Metric("requests_per_s", "requests/s", "rate", "higher"),
    Metric("tokens_per_s", "tokens/s", "rate", "higher"),
    Metric("normalized_s", "normalized latency", "s", "lower"),
    Metric("e2e_p50_s", "end to end p50", "s", "lower"),
    Metric("e2e_p90_s", "end to end p90", "s", "lower"),
    Metric("at_once", "requests at once", "count"),
    Metric("states_share", "of the pool, holding tokens", "share", "higher"),
    Metric("preemptions", "preemptions", "count", "lower"),
    Metric("swaps", "swapped out", "count", "lower"),
    Metric("step_p50_s", "step p50", "s", "lower"),
    Metric("step_p99_s", "step p99", "s", "lower"),
    Metric("step_max_s", "step, longest", "s", "lower"),
    Metric("calls_unhidden", "driver calls waited for", "count", "lower"),
    Metric("kv_bytes_per_s", "new KV memory, bytes/s", "rate"),
    Metric("prefix_hit_rate", "prefix cache hits", "share", "higher"),
)
#: Metrics by name, in the order in which they are shown.
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ALL}


@dataclass(frozen=True, slots=True)
class RealOptions:
    """``quick`` measures little, to see that everything runs. ``model``: of the engine."""

    quick: bool = False
    seed: int = 0
    model: str | None = None

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 3

    def pick(self, full: int, quick: int) -> int:
        return quick if self.quick else full


@dataclass(slots=True)
class Points:
    """Values of each round by case and metric."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, case: str, **metrics: float) -> None:
        """Raises KeyError for a metric that :data:`METRICS` does not have."""
        for name, value in metrics.items():
            METRICS[name]
            self.values.setdefault(case, {}).setdefault(name, []).append(float(value))

    def median(self, case: str, metric: str) -> float:
        return statistics.median(self.values[case][metric])

    def cell(self, case: str, metric: str) -> str:
        """The median of the rounds, and their range where there are several that differ."""
        values = sorted(self.values[case][metric])
        show = METRICS[metric].format
        text = show(statistics.median(values))
        low, high = show(values[0]), show(values[-1])
        return text if low == high else f"{text} ({low} to {high})"

    def ratio(self, case: str, other: str, metric: str) -> str:
        """Ratio of medians, ``case`` over ``other``."""
        below = self.median(other, metric)
        return f"{self.median(case, metric) / below:.2f}" if below else "-"

    def to_dict(self) -> dict[str, Any]:
        return {"cases": {case: dict(metrics) for case, metrics in self.values.items()}}


def shuffled(items: Sequence[_T], rounds: int, seed: int, report: Report) -> Iterator[_T]:
    """Yield every item once a round, in a random order, so that drift meets all alike."""
    rng, done = random.Random(seed), 0
    for _ in range(rounds):
        order = list(items)
        rng.shuffle(order)
        for item in order:
            yield item
            done += 1
            report(done / (rounds * len(items)))
