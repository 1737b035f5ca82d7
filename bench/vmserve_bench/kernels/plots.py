"""One plot per section, from the JSON that the command writes. Needs the ``bench`` extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from vmserve_bench.lab.plots import save

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from matplotlib.axes import Axes

__all__ = ["draw"]

_COLORS = {"read": "#888888", "contiguous": "#1b7837", "paged": "#2166ac", "sdpa": "#d73027"}


def draw(sections: Mapping[str, Any], directory: Path) -> list[Path]:
    """Draws ``<section>.png`` for each section there is; the files' paths."""
    return save({name: (name, plot) for name, plot in _PLOTS.items()}, sections, directory)


def _figure(points: list[dict[str, Any]]) -> tuple[Figure, dict[tuple[str, str], Axes]]:
    """A panel for each shape and dtype."""
    names = list(dict.fromkeys((point["shape"], point["dtype"]) for point in points))
    figure = Figure(figsize=(2.9 * len(names), 3.4), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False).ravel()
    for (shape, dtype), axis in zip(names, axes, strict=True):
        axis.set_title(f"{shape} {dtype}")
    return figure, dict(zip(names, axes, strict=True))


def _decode(data: Mapping[str, Any]) -> Figure:
    """Bytes of K and V a second, by context and batch."""
    figure, axes = _figure(data["points"])
    for (shape, dtype), axis in axes.items():
        points = [p for p in data["points"] if (p["shape"], p["dtype"]) == (shape, dtype)]
        labels = [f"{p['context'] // 1024 or p['context']}k x {p['num_seqs']}" for p in points]
        for name, color in _COLORS.items():
            rates = [p["layer_bytes"] / p["layer_ns"][name] for p in points]
            axis.plot(labels, rates, marker=".", color=color, label=name)
        axis.tick_params(axis="x", labelrotation=90)
        axis.set_ylim(bottom=0)
    first = next(iter(axes.values()))
    first.set_ylabel("GB/s of K and V")
    first.legend(fontsize=7, loc="lower left", framealpha=0.7)
    figure.supxlabel("context x batch", fontsize=9)
    return figure


def _blocks(data: Mapping[str, Any]) -> Figure:
    """Time over that of the contiguous view, by block size."""
    figure, axes = _figure(data["points"])
    for point in data["points"]:
        axis = axes[point["shape"], point["dtype"]]
        sizes = data["block_sizes"]
        ratios = np.array([point["ratio_to_contiguous"][f"blocks of {size}"] for size in sizes])
        spread = np.abs(ratios[:, 1:] - ratios[:, :1]).T
        labels = [str(size) for size in sizes]
        axis.errorbar(labels, ratios[:, 0], spread, marker="o", capsize=3, color=_COLORS["paged"])
        axis.axhline(1.0, color=_COLORS["contiguous"], linewidth=0.8)
        axis.set_ylim(bottom=0)
    next(iter(axes.values())).set_ylabel("time / contiguous")
    figure.supxlabel("tokens a block", fontsize=9)
    return figure


def _prefill(data: Mapping[str, Any]) -> Figure:
    """10^9 operations a second of each chunk."""
    figure, axes = _figure(data["points"])
    names = ("contiguous", "paged", "sdpa")
    for (shape, dtype), axis in axes.items():
        points = [p for p in data["points"] if (p["shape"], p["dtype"]) == (shape, dtype)]
        at = np.arange(len(points))
        for offset, name in enumerate(names):
            rates = [p["layer_products"] / p["layer_ns"][name] for p in points]
            axis.bar(at + 0.27 * (offset - 1), rates, 0.25, color=_COLORS[name], label=name)
        labels = [f"{p['context'] - p['num_new']} + {p['num_new']}" for p in points]
        axis.set_xticks(at, labels, rotation=90)
    first = next(iter(axes.values()))
    first.set_ylabel("GFLOP/s")
    first.legend(fontsize=7)
    figure.supxlabel("past + new tokens", fontsize=9)
    return figure


_PLOTS: Mapping[str, Callable[[Mapping[str, Any]], Figure]] = {
    "decode": _decode,
    "blocks": _blocks,
    "prefill": _prefill,
}
