"""One plot per section, from the JSON that the command writes. Needs the ``bench`` extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from vmserve.numbers.sizes import format_size
from vmserve_bench.alloc.bandwidth import WAYS as BANDWIDTH_WAYS
from vmserve_bench.alloc.bookkeeping import PARTS as BOOKKEEPING_PARTS
from vmserve_bench.alloc.prefill import WAYS as PREFILL_WAYS
from vmserve_bench.alloc.reference import (
    PAGED_ATTENTION_USED_PERCENT_ABOVE,
    PAPER_EXISTING_USED_PERCENT,
)
from vmserve_bench.alloc.replay import PARTS as USAGE_PARTS
from vmserve_bench.lab.plots import save

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from matplotlib.axes import Axes

__all__ = ["draw"]

_USAGE_COLORS = ("#1b7837", "#a6dba0", "#d73027", "#fdae61", "#dddddd")


def draw(sections: Mapping[str, Any], directory: Path) -> list[Path]:
    """Draws ``<section>.png`` for each section there is; the files' paths."""
    return save({name: (name, plot) for name, plot in _PLOTS.items()}, sections, directory)


def _figure(width: float, height: float, rows: int, columns: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.ravel())


def _calls(data: Mapping[str, Any]) -> Figure:
    calls = data["calls"]
    lengths = sorted({call["num_pages"] for call in calls})
    figure, axes = _figure(11, 3.6, 1, len(lengths))
    for axis, num_pages in zip(axes, lengths, strict=True):
        for name in dict.fromkeys(call["operation"] for call in calls):
            rows = [c for c in calls if c["operation"] == name and c["num_pages"] == num_pages]
            axis.plot(
                [row["page_bytes"] for row in rows],
                [row["median_ns"] / 1e3 for row in rows],
                marker=".",
                label=name,
            )
        _page_axis(axis, sorted({call["page_bytes"] for call in calls}))
        axis.set(yscale="log", ylabel="us a call, median", title=f"runs of {num_pages}")
    axes[0].legend(fontsize=7)
    return figure


def _steps(data: Mapping[str, Any]) -> Figure:
    cases = data["cases"]
    figure, axes = _figure(11, 2.6 * len(cases), len(cases), 1)
    for axis, (name, case) in zip(axes, cases.items(), strict=True):
        for way, values in reversed(case["ways"].items()):
            trace = np.asarray(values["trace_memory_us"]) / 1e3
            axis.plot(trace[:400], linewidth=0.8, label=way)
        axis.set(title=name, ylabel="memory calls, ms")
    axes[0].legend(loc="upper right", fontsize=8)
    axes[-1].set_xlabel("step")
    return figure


def _prefill(data: Mapping[str, Any]) -> Figure:
    figure, (axis,) = _figure(6, 3.8, 1, 1)
    prompts = sorted({row["prompt_tokens"] for row in data["prompts"]})
    for way in PREFILL_WAYS:
        rows = [row for row in data["prompts"] if row["state"] == way]
        axis.plot(prompts, [row["median_ns"] / 1e6 for row in rows], marker="o", label=way)
    axis.set(xscale="log", yscale="log", xlabel="prompt, tokens", ylabel="ms until writable")
    axis.set_xticks(prompts, [f"{prompt:,}" for prompt in prompts])
    axis.minorticks_off()
    axis.legend()
    return figure


def _bandwidth(data: Mapping[str, Any]) -> Figure:
    figure, (axis,) = _figure(6, 3.8, 1, 1)
    rows = data["page_sizes"]
    sizes = [row["page_bytes"] for row in rows]
    for way in BANDWIDTH_WAYS:
        axis.plot(sizes, [row["gb_per_s"][way] for row in rows], marker="o", label=way)
    quoted = [row for row in rows if row["vattention_a100_gb_per_s"] is not None]
    axis.plot(
        [row["page_bytes"] for row in quoted],
        [row["vattention_a100_gb_per_s"] for row in quoted],
        "k--",
        marker="x",
        label="vAttention's paper (A100)",
    )
    _page_axis(axis, sizes)
    axis.set(yscale="log", ylabel="GB/s")
    axis.legend()
    return figure


def _batch(data: Mapping[str, Any]) -> Figure:
    figure, (batches, waste) = _figure(10, 3.8, 1, 2)
    names = [f"{row['view']}\n{row['page_tokens']}" for row in data["variants"]]
    batches.bar(names, [row["replay"]["mean_batch"] for row in data["variants"]])
    batches.set(ylabel="running requests, mean", xlabel="view, tokens a page")
    waste.bar(
        names,
        [row["replay"]["wasted_positions_per_request"] for row in data["variants"]],
        color="#d73027",
    )
    waste.set(ylabel="allocated, not written: tokens a request", xlabel="view, tokens a page")
    for axis in (batches, waste):
        axis.tick_params(axis="x", labelsize=7)
    return figure


def _waste(data: Mapping[str, Any]) -> Figure:
    traces = data["traces"]
    figure, axes = _figure(11, 4.2, 1, len(traces))
    low, high = PAPER_EXISTING_USED_PERCENT
    for axis, (trace, values) in zip(axes, traces.items(), strict=True):
        names = [row["system"] for row in values["systems"]]
        left = np.zeros(len(names))
        for part, color in zip(USAGE_PARTS, _USAGE_COLORS, strict=True):
            share = np.array([row["percent"][part] for row in values["systems"]])
            axis.barh(names, share, left=left, color=color, label=part)
            left += share
        axis.axvspan(low, high, color="k", alpha=0.12)
        axis.axvline(PAGED_ATTENTION_USED_PERCENT_ABOVE, color="k", linestyle=":")
        axis.invert_yaxis()
        axis.set(title=trace, xlim=(0, 100), xlabel="percent of the pool")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.suptitle(
        "grey and dotted: existing systems and PagedAttention as the paper has them", fontsize=8
    )
    return figure


def _bookkeeping(data: Mapping[str, Any]) -> Figure:
    rows = data["rows"]
    figure, (axis,) = _figure(8, 3.8, 1, 1)
    names = [f"{row['regime']}\n{row['num_seqs']}" for row in rows]
    bottom = np.zeros(len(rows))
    for part in BOOKKEEPING_PARTS:
        height = np.array([row["parts_ns"][part]["median"] / 1e3 for row in rows])
        axis.bar(names, height, bottom=bottom, label=part)
        bottom += height
    axis.axhline(data["goal_plan_apply_ns"] / 1e3, color="k", linestyle=":")
    axis.set(ylabel="us a step, median", title="dotted: goal for plan + apply of 256 sequences")
    axis.legend()
    return figure


def _page_axis(axis: Axes, sizes: list[int]) -> None:
    axis.set(xscale="log", xlabel="page")
    axis.set_xticks(sizes, [format_size(size) for size in sizes], rotation=45)
    axis.minorticks_off()


_PLOTS: dict[str, Callable[[Mapping[str, Any]], Figure]] = {
    "calls": _calls,
    "steps": _steps,
    "prefill": _prefill,
    "bandwidth": _bandwidth,
    "batch": _batch,
    "waste": _waste,
    "bookkeeping": _bookkeeping,
}
