"""One picture: each metric of each engine, as bars, with the range over repeats."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from report import present

Json = dict[str, Any]

OURS, THEIRS = "#1f6f4a", "#9aa5b1"


def draw(results: Json, path: Path) -> None:
    """A row per model, a column per metric; longer bars are better only where so titled."""
    models = list(results["values"])
    columns = max(len(present(values)) for values in results["values"].values())
    rows = max(len(values) for values in results["values"].values())
    figure, axes = pyplot.subplots(
        len(models),
        columns,
        figsize=(2.3 * columns + 2.0, (0.36 * rows + 1.1) * len(models)),
        squeeze=False,
        layout="constrained",
    )
    for model, line in zip(models, axes, strict=True):
        draw_model(model, results["values"][model], line)
    figure.savefig(path)
    pyplot.close(figure)


def draw_model(model: str, values: Json, axes: Any) -> None:
    subjects = list(values)
    for place, (metric, axis) in enumerate(zip(present(values), axes, strict=False)):
        for row, subject in enumerate(subjects):
            each = [v * metric.scale for v in values[subject].get(metric.name, {}).values()]
            if not each:
                axis.text(0, row, " not measured", va="center", fontsize=6, color="#777777")
                continue
            middle = statistics.median(each)
            color = OURS if subject.startswith("vmserve") else THEIRS
            axis.barh(row, middle, color=color)
            axis.plot([min(each), max(each)], [row, row], color="black", linewidth=1)
        better = "more is better" if metric.higher_is_better else "less is better"
        axis.set_title(f"{metric.title}\n{metric.unit}, {better}", fontsize=7)
        axis.set_yticks(range(len(subjects)), subjects if place == 0 else [], fontsize=7)
        axis.set_ylim(len(subjects) - 0.4, -0.6)
        axis.set_xlim(left=0)
        axis.tick_params(axis="x", labelsize=6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(model, fontsize=9)
    for axis in axes[len(present(values)) :]:
        axis.set_visible(False)
