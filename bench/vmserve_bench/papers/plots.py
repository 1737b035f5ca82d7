"""One plot per figure, from the JSON that the command writes. Needs the ``bench`` extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from vmserve_bench.lab.plots import save
from vmserve_bench.papers.figures import LATENCY_BOUND

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from matplotlib.axes import Axes

__all__ = ["draw"]

_TITLE = "simulated: OPT-13B on an A100 40GB"


def draw(figures: Mapping[str, Any], directory: Path) -> list[Path]:
    """Draws ``figure-<number>.png`` for each figure there is; the files' paths."""
    return save(
        {f"figure-{name}": (name, plot) for name, plot in _PLOTS.items()}, figures, directory
    )


def _axes(columns: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(4.6 * columns, 3.6), layout="constrained")
    figure.suptitle(_TITLE)
    return figure, list(figure.subplots(1, columns, squeeze=False).ravel())


def _curves(axis: Axes, found: Mapping[str, Any]) -> None:
    for system, entry in found.items():
        points = entry["points"]
        axis.plot(
            [point["request_rate"] for point in points],
            [point["normalized_latency"] for point in points],
            marker=".",
            label=system,
        )
    axis.axhline(LATENCY_BOUND, color="#999999", linewidth=0.8, linestyle=":")
    axis.set_ylim(0, 1)
    axis.set_xlabel("requests/s")
    axis.set_ylabel("normalized latency (s/token)")
    axis.legend(fontsize=7)


def _figure_12(data: Mapping[str, Any]) -> Figure:
    figure, axes = _axes(len(data))
    for axis, (workload, found) in zip(axes, data.items(), strict=True):
        _curves(axis, found)
        axis.set_title(workload)
    return figure


def _figure_13(data: Mapping[str, Any]) -> Figure:
    figure, axes = _axes(len(data))
    for axis, (workload, batches) in zip(axes, data.items(), strict=True):
        names = list(batches)
        axis.barh(names, [batches[name]["saturated"] for name in names], color="#1b7837")
        axis.invert_yaxis()
        axis.set_xlabel("requests that run at once, saturated")
        axis.set_title(workload)
    return figure


def _figure_14(data: Mapping[str, Any]) -> Figure:
    figure, [axis] = _axes(1)
    labels = list(data)
    for shift, system in enumerate(next(iter(data.values()))):
        rates = [data[label][system]["sustained_requests_per_second"] for label in labels]
        axis.bar([i + 0.4 * shift for i in range(len(labels))], rates, 0.4, label=system)
    axis.set_xticks([i + 0.2 for i in range(len(labels))], labels, rotation=30, ha="right")
    axis.set_ylabel("sustained requests/s, Alpaca")
    axis.legend(fontsize=7)
    return figure


def _figure_19(data: Mapping[str, Any]) -> Figure:
    figure, [left, right] = _axes(2)
    sizes = [int(size) for size in data]
    for name, label in (
        ("recompute_seconds", "recompute"),
        ("swap_seconds", "swap, a copy per block"),
        ("swap_merged_seconds", "swap, adjacent blocks merged"),
    ):
        left.plot(sizes, [1e3 * entry[name] for entry in data.values()], marker=".", label=label)
    left.set_ylabel("one victim of 256 tokens (ms)")
    for how in ("recompute", "swap"):
        latencies = [1e3 * entry[how]["normalized_latency"] for entry in data.values()]
        right.plot(sizes, latencies, marker=".", label=how)
    right.set_ylabel("normalized latency (ms/token)")
    right.set_ylim(bottom=0)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("block size (tokens)")
        axis.legend(fontsize=7)
    return figure


_PLOTS: dict[str, Callable[[Mapping[str, Any]], Figure]] = {
    "12": _figure_12,
    "13": _figure_13,
    "14": _figure_14,
    "19": _figure_19,
}
