"""The report's plots, as SVG."""

from __future__ import annotations

import base64
import io
import math
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from vmserve_bench.ab.metrics import METRICS, judgement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from matplotlib.axes import Axes

__all__ = ["COLORS", "Plot", "largest", "search", "workload"]

Json: TypeAlias = dict[str, Any]
#: A title, and an SVG as a data URL, which stands alone.
Plot: TypeAlias = tuple[str, str]
Points: TypeAlias = "Sequence[tuple[float, float]]"

#: Colours of the variants in order: Okabe and Ito's (2008).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9")
MAX_POINTS = 300
_MIB = float(1 << 20)
_STYLES = ("-", (0, (7, 3)), (0, (2, 2)), (0, (9, 3, 2, 3)), (0, (4, 4)), "-")
#: Layers of the plots of memory and of sequences: column, label and colour.
_STATES = (
    ("tokens_bytes", "tokens", "#0072b2"),
    ("waste_bytes", "waste in used pages", "#d55e00"),
    ("idle_bytes", "cached or parked", "#8a6d00"),
    ("in_transit_bytes", "on the way", "#cc79a7"),
    ("free_bytes", "committed, free", "#dfe3e8"),
)
_VIEWS = (("virtual", "virtual", "#0072b2"), ("paged", "paged", "#d55e00"))
_VERDICTS = {"better": "#0a7a55", "worse": "#b3411a"}
_NEUTRAL = "#60646c"
#: Texts stay text, so that files are small and can be searched. Ids do not depend on chance.
_STYLE: Any = {
    "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "vmserve", "text.parse_math": False,
}  # fmt: skip


def workload(names: Sequence[str], workload: Json) -> list[Plot]:
    """Plot ratios, distributions of latencies, and values over time."""
    rounds = workload["rounds"]
    plots = []
    for name, found in workload["comparisons"].items():
        rows = [one for one in found if one["verdict"] is not None and one["low"] is not None]
        if rows:
            height = 0.9 + 0.24 * len(rows)
            plots.append(_draw(f"{name} / {names[0]}", partial(_forest, rows), height))
    return [*plots, *_latencies(names, rounds), *_over_time(names, rounds)]


def search(names: Sequence[str], search: Json) -> list[Plot]:
    """Plot what was measured at each rate that was tried."""
    plots: list[Plot] = []
    for metric, title, factor in (
        ("normalized_mean_s", "normalized latency, ms per token", 1e3),
        ("ttft_p95_s", "TTFT p95, ms", 1e3),
        ("goodput_share", "share of requests in time", 1.0),
    ):
        series = {
            name: sorted(
                (probe["rate_per_s"], probe["metrics"][metric] * factor)
                for probe in search["probes"]
                if probe["variant"] == name and probe["metrics"][metric] is not None
            )
            for name in names
        }
        plots += _lines(title, "requests/s", title, series, is_log=True, marker="o")
    return plots


def _draw(title: str, draw: Callable[[Axes], object], height: float = 2.9) -> Plot:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.8, height), layout="constrained")
        axis = figure.subplots()
        axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axis.grid(color="#e2e5e9")
        axis.set_axisbelow(True)
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
        draw(axis)
        if axis.get_legend_handles_labels()[1]:
            figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    encoded = base64.b64encode(file.getvalue().encode()).decode()
    return title, f"data:image/svg+xml;base64,{encoded}"


def _lines(
    title: str,
    x: str,
    y: str,
    series: Mapping[str, Points],
    *,
    is_log: bool = False,
    marker: str = "",
    end: float | None = None,
) -> Iterator[Plot]:
    """A line for each series that has points, if any has. ``end``: of the x axis."""

    def draw(axis: Axes) -> None:
        for place, (name, points) in enumerate(series.items()):
            if points:
                color, style = COLORS[place % len(COLORS)], _STYLES[place % len(_STYLES)]
                axis.plot(
                    *zip(*points, strict=True),
                    label=name, color=color, linestyle=style, marker=marker, clip_on=False,
                    gid=f"line{place}",
                )  # fmt: skip
        axis.set(xlabel=x, ylabel=y, ylim=(0, None))
        if is_log:
            _log(axis)
        else:
            axis.set_xlim(0, end)

    if any(series.values()):
        yield _draw(title, draw)


def _log(axis: Axes) -> None:
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(NullLocator())


def _forest(rows: Sequence[Json], axis: Axes) -> None:
    """Ratios with their intervals; one that leaves the picture ends in an arrow."""
    values = [one[key] for one in rows for key in ("ratio", "low", "high") if one[key] is not None]
    inside = [value for value in values if 0.2 <= value <= 5.0] or [1.0]
    low_x, high_x = min(*inside, 1 / 1.05) / 1.02, max(*inside, 1.05) * 1.02
    axis.axvline(1, color=_NEUTRAL, linestyle=(0, (4, 3)))
    for place, one in enumerate(rows):
        verdict = judgement(one["verdict"], METRICS[one["metric"]].better)
        color = _VERDICTS.get(verdict, _NEUTRAL)
        low, high = one["low"], math.inf if one["high"] is None else one["high"]
        ends = [min(max(value, low_x), high_x) for value in (low, high)]
        axis.plot(ends, [place] * 2, color=color, linewidth=3, solid_capstyle="round")
        axis.plot(one["ratio"], place, "o", color=color)
        for leaves, bound, mark in ((low < low_x, low_x, "<"), (high > high_x, high_x, ">")):
            if leaves:
                axis.plot(bound, place, mark, color=color, gid=f"arrow{place}", clip_on=False)
    _log(axis)
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.set(xlabel="ratio, 99 % interval", xlim=(low_x, high_x))
    axis.set_yticks(range(len(rows)), [METRICS[one["metric"]].title for one in rows])
    axis.invert_yaxis()


def _latencies(names: Sequence[str], rounds: Sequence[Json]) -> Iterator[Plot]:
    """Cumulative distributions of milliseconds, all rounds together."""
    reads: dict[str, Callable[[Json], list[float]]] = {
        "time to the first token": lambda request: [request["ttft_us"]],
        "time between tokens": lambda request: request["itl_us"],
        "end to end": lambda request: [request["e2e_us"]],
        "normalized latency, per token": lambda request: [
            request["e2e_us"] / request["output_tokens"]
        ],
    }
    for title, read in reads.items():
        series = {}
        for name in names:
            requests = [each for one in rounds for each in one["runs"][name]["requests"]]
            values = sorted(max(value / 1000, 1e-3) for each in requests for value in read(each))
            shares = [index / 200 for index in range(201)] if values else []
            last = len(values) - 1
            series[name] = [(values[min(last, math.floor(s * (last + 1)))], s) for s in shares]
        yield from _lines(title, "ms", "share of all rounds' samples", series, is_log=True)


def _over_time(names: Sequence[str], rounds: Sequence[Json]) -> Iterator[Plot]:
    """The round of median length, so that it is a usual one."""
    by_length = sorted(rounds, key=lambda one: float(one["runs"][names[0]]["elapsed_s"]))
    shown = by_length[(len(by_length) - 1) // 2]
    runs = {name: shown["runs"][name] for name in names}
    told = f"round {shown['index'] + 1}"
    end = max(run["elapsed_s"] for run in runs.values())
    for title, column, unit, factor in (
        ("sequences in a step", "sequences", "sequences", 1.0),
        ("time of a step", "took_us", "ms", 1e-3),
    ):
        series = {}
        for name, run in runs.items():
            times = [at / 1e6 for at in run["steps"]["ended_us"]]
            series[name] = largest(times, [value * factor for value in run["steps"][column]])
        yield from _lines(f"{title}, {told}", "s", unit, series, end=end)
    throughput = {
        name: [(one["index"] + 1, one["metrics"][name]["output_tokens_per_s"]) for one in rounds]
        for name in names
    }
    title = "output tokens/s of every round"
    yield from _lines(title, "round", "tokens/s", throughput, marker="o")
    memories = {name: run["memory"] for name, run in runs.items()}
    top = max(
        sum(states) / _MIB
        for memory in memories.values()
        for states in zip(*(memory[column] for column, _, _ in _STATES), strict=True)
    )
    for name, memory in memories.items():
        draw = partial(_stacked, memory, _STATES, "MiB", _MIB, (end, top))
        yield _draw(f"{name}: KV memory by state, {told}", draw)
    for name, memory in memories.items():
        draw = partial(_stacked, memory, _VIEWS, "sequences", 1.0, (end, None))
        yield _draw(f"{name}: sequences by view, {told}", draw)


def largest(times: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """Thin to few points: the largest of each stretch, so that no spike is lost."""
    stretch = -(-len(times) // MAX_POINTS)
    points = []
    for begin in range(0, len(times), stretch):
        place = max(range(begin, min(begin + stretch, len(times))), key=lambda one: values[one])
        points.append((times[place], values[place]))
    return points


def _stacked(
    memory: Json,
    layers: Sequence[tuple[str, str, str]],
    unit: str,
    unit_size: float,
    ends: tuple[float, float | None],
    axis: Axes,
) -> None:
    """Areas on top of each other, at few enough points, the last of all among them."""
    last = len(memory["at_us"]) - 1
    places = [*range(0, last, -(-(last + 1) // MAX_POINTS)), last]

    def column(name: str, size: float) -> list[float]:
        return [memory[name][place] / size for place in places]

    columns, labels, colors = zip(*layers, strict=True)
    values = [column(name, unit_size) for name in columns]
    axis.stackplot(column("at_us", 1e6), values, labels=labels, colors=colors)
    axis.set(xlabel="s", ylabel=unit, xlim=(0, ends[0]), ylim=(0, ends[1]))
