"""Plots of ``vmserve bench sharing``, from its JSON. Needs the ``bench`` extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from vmserve_bench.lab.plots import save
from vmserve_bench.sharing.reference import PAPER_BLOCK_TOKENS, PAPER_PREFIX_SPEEDUP

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from matplotlib.axes import Axes

__all__ = ["draw"]

_MEASURED, _ANALYTIC, _VIRTUAL = "#1b7837", "#a6dba0", "#2166ac"


def draw(sections: Mapping[str, Any], directory: Path) -> list[Path]:
    """Draws the plots of each section there is; the files' paths."""
    plots = {
        "saved-by-width": ("blocks", lambda blocks: _by_width(blocks["runs"])),
        "saved-by-block-size": ("blocks", lambda blocks: _by_block_size(blocks["runs"])),
        "prefix": ("prefix", lambda prefix: _prefix(prefix["cases"])),
    }
    return save(plots, sections, directory)


def _panels(runs: list[dict[str, Any]]) -> tuple[Figure, dict[tuple[str, str], Axes]]:
    keys = list(dict.fromkeys((run["workload"], run["method"]) for run in runs))
    figure = Figure(figsize=(2.9 * len(keys) + 0.6, 3.8), layout="constrained")
    axes = figure.subplots(1, len(keys), squeeze=False)[0]
    for axis, (workload, method) in zip(axes, keys, strict=True):
        axis.set_title(f"{workload}, {method}")
    return figure, dict(zip(keys, axes, strict=True))


def _by_width(runs: list[dict[str, Any]]) -> Figure:
    figure, panels = _panels(runs)
    for (workload, method), axis in panels.items():
        mine = [run for run in runs if (run["workload"], run["method"]) == (workload, method)]
        sized = [
            (run, size)
            for run in mine
            for size in run["sizes"]
            if size["block_tokens"] == PAPER_BLOCK_TOKENS
        ]
        places = np.arange(len(sized))
        for offset, name, color, values in (
            (-0.27, "measured", _MEASURED, [size["saved_percent"] for _, size in sized]),
            (0.0, "analytic", _ANALYTIC, [size["analytic_percent"] for _, size in sized]),
            (0.27, "virtual, pages", _VIRTUAL, [r["virtual"]["saved_percent"] for r, _ in sized]),
        ):
            axis.bar(places + offset, values, 0.25, label=name, color=color)
        if mine[0]["paper_percent"]:
            low, high = mine[0]["paper_percent"]
            axis.axhspan(low, high, color="k", alpha=0.12, label="paper, widths 2 to 6")
        axis.set_xticks(places, [str(run["width"]) for run, _ in sized])
        axis.set(xlabel="width", ylabel="blocks saved, percent", ylim=(0, None))
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _by_block_size(runs: list[dict[str, Any]]) -> Figure:
    figure, panels = _panels(runs)
    for run in runs:
        axis = panels[run["workload"], run["method"]]
        sizes = [size["block_tokens"] for size in run["sizes"]]
        saved = [size["saved_percent"] for size in run["sizes"]]
        axis.plot(sizes, saved, marker="o", label=f"width {run['width']}")
        axis.set(xscale="log", xlabel="block, tokens", ylabel="blocks saved, percent")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        axis.legend(fontsize=7)
    for axis in panels.values():
        axis.set_ylim(bottom=0)
    return figure


def _prefix(cases: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    throughput, speedup = figure.subplots(1, 2)
    names = [f"{case['regime']}\n{case['prefix_tokens']}\n{case['mode']}" for case in cases]
    places = np.arange(len(cases))
    for offset, label, key in ((-0.2, "with", "with"), (0.2, "without", "without")):
        values = [case[f"requests_per_s_{key}"] for case in cases]
        throughput.bar(places + offset, values, 0.38, label=f"{label} prefix cache")
    throughput.set(ylabel="requests a second")
    throughput.legend(fontsize=7)
    ratios = np.array([case["paired"]["ratio_b_to_a"] for case in cases])
    low = ratios - [case["paired"]["ratio_99_low"] for case in cases]
    high = [case["paired"]["ratio_99_high"] for case in cases] - ratios
    speedup.bar(places, ratios, yerr=[low, high], color=_MEASURED, capsize=3)
    for shots, value in PAPER_PREFIX_SPEEDUP.items():
        speedup.axhline(value, color="k", linestyle=":", linewidth=0.8)
        speedup.text(-0.4, value, f" paper, {shots}, over Orca (Oracle)", va="bottom", fontsize=7)
    speedup.axhline(1.0, color="k", linewidth=0.8)
    speedup.set(ylabel="times without cache, 99 % interval")
    for axis in (throughput, speedup):
        axis.set_xticks(places, names, fontsize=7)
    return figure
