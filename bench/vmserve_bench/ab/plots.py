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

from vmserve_bench.ab.metrics import METRICS, kind_of
from vmserve_bench.ab.record import MEMORY_STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from matplotlib.axes import Axes

__all__ = ["Plot", "largest", "search", "workload"]

Json: TypeAlias = dict[str, Any]
#: A title, and an SVG as a data URL, which stands alone.
Plot: TypeAlias = tuple[str, str]
Points: TypeAlias = "Sequence[tuple[float, float]]"

#: Colours of the variants in order: Okabe and Ito's (2008).
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9")
MAX_POINTS = 300
_MIB = float(1 << 20)
_STYLES = ("-", (0, (7, 3)), (0, (2, 2)), (0, (9, 3, 2, 3)), (0, (4, 4)), "-")
_STATES = {
    "tokens": ("tokens", "#0072b2"),
    "waste": ("waste in used pages", "#d55e00"),
    "idle": ("cached or parked", "#8a6d00"),
    "in_transit": ("on the way", "#cc79a7"),
    "free": ("committed, free", "#dfe3e8"),
}
_VIEWS = {"virtual": "#0072b2", "paged": "#d55e00"}
_VERDICTS = {"better": "#0a7a55", "worse": "#b3411a", "neutral": "#60646c"}
#: Texts stay text, so that files are small and can be searched. Ids do not depend on chance.
_STYLE: Any = {
    "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "vmserve", "text.parse_math": False,
}  # fmt: skip


def workload(names: Sequence[str], workload: Json) -> list[Plot]:
    """Plot ratios, distributions of latencies, and values over time."""
    rounds = workload["rounds"]
    return [
        *_forests(names[0], workload["comparisons"]),
        *_latencies(names, rounds),
        *_over_time(names, rounds),
    ]


def search(names: Sequence[str], search: Json) -> list[Plot]:
    """Plot what was measured at each rate that was tried."""
    plots = []
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
        if any(series.values()):
            plots.append(_lines(title, "requests/s", title, series, is_log=True, marker="o"))
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
) -> Plot:
    """A line for each series; one without points is left out. ``end``: of the x axis."""

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

    return _draw(title, draw)


def _log(axis: Axes) -> None:
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(NullLocator())


def _stacked(
    title: str,
    y: str,
    times: Sequence[float],
    layers: Mapping[str, tuple[Sequence[float], str]],
    end: float,
    top: float | None = None,
) -> Plot:
    """Areas on top of each other: values and colour by name."""

    def draw(axis: Axes) -> None:
        values = [values for values, _ in layers.values()]
        colors = [color for _, color in layers.values()]
        axis.stackplot(times, values, labels=list(layers), colors=colors)
        axis.set(xlabel="s", ylabel=y, xlim=(0, end), ylim=(0, top))

    return _draw(title, draw)


def _forests(first: str, comparisons: Mapping[str, Sequence[Json]]) -> Iterable[Plot]:
    """Ratios with their intervals; one that leaves the picture ends in an arrow."""
    for name, found in comparisons.items():
        rows = [one for one in found if one["verdict"] is not None and one["low"] is not None]
        if rows:
            height = 0.9 + 0.24 * len(rows)
            yield _draw(f"{name} / {first}", partial(_forest, rows), height)


def _forest(rows: Sequence[Json], axis: Axes) -> None:
    values = [one[key] for one in rows for key in ("ratio", "low", "high") if one[key] is not None]
    inside = [value for value in values if 0.2 <= value <= 5.0] or [1.0]
    low_x, high_x = min(*inside, 1 / 1.05) / 1.02, max(*inside, 1.05) * 1.02
    axis.axvline(1, color="#60646c", linestyle=(0, (4, 3)))
    for place, one in enumerate(rows):
        color = _VERDICTS[kind_of(one)]
        high = math.inf if one["high"] is None else one["high"]
        ends = [min(max(value, low_x), high_x) for value in (one["low"], high)]
        axis.plot(ends, [place] * 2, color=color, linewidth=3, solid_capstyle="round")
        axis.plot(one["ratio"], place, "o", color=color)
        for value, bound, mark in ((one["low"], low_x, "<"), (high, high_x, ">")):
            if (value < bound) if mark == "<" else (value > bound):
                axis.plot(bound, place, mark, color=color, gid=f"arrow{place}", clip_on=False)
    _log(axis)
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.set(xlabel="ratio, 99 % interval", xlim=(low_x, high_x))
    axis.set_yticks(range(len(rows)), [METRICS[one["metric"]].title for one in rows])
    axis.invert_yaxis()


def _latencies(names: Sequence[str], rounds: Sequence[Json]) -> Iterable[Plot]:
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
            values = sorted(
                max(value / 1000, 1e-3)
                for one in rounds
                for request in one["runs"][name]["requests"]
                for value in read(request)
            )
            shares = [index / 200 for index in range(201)] if values else []
            last = len(values) - 1
            series[name] = [(values[min(last, math.floor(s * (last + 1)))], s) for s in shares]
        if any(series.values()):
            yield _lines(title, "ms", "share of all rounds' samples", series, is_log=True)


def _over_time(names: Sequence[str], rounds: Sequence[Json]) -> Iterable[Plot]:
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
        series = {name: _steps(run["steps"], column, factor) for name, run in runs.items()}
        yield _lines(f"{title}, {told}", "s", unit, series, end=end)
    throughput = {
        name: [(one["index"] + 1, one["metrics"][name]["output_tokens_per_s"]) for one in rounds]
        for name in names
    }
    yield _lines("output tokens/s of every round", "round", "tokens/s", throughput, marker="o")
    memories = {name: _Memory(run["memory"]) for name, run in runs.items()}
    peak = max(memory.peak() for memory in memories.values())
    for name, memory in memories.items():
        layers = {
            label: (memory.column(f"{state}_bytes", _MIB), color)
            for state, (label, color) in ((each, _STATES[each]) for each in MEMORY_STATES)
        }
        title = f"{name}: KV memory by state, {told}"
        yield _stacked(title, "MiB", memory.times, layers, end, peak)
    for name, memory in memories.items():
        views = {view: (memory.column(view), color) for view, color in _VIEWS.items()}
        title = f"{name}: sequences by view, {told}"
        yield _stacked(title, "sequences", memory.times, views, end)


def _steps(steps: Json, column: str, factor: float) -> Points:
    times = [at / 1e6 for at in steps["ended_us"]]
    return largest(times, [value * factor for value in steps[column]])


def largest(times: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """Thin to few points: the largest of each stretch, so that no spike is lost."""
    stretch = -(-len(times) // MAX_POINTS)
    points = []
    for begin in range(0, len(times), stretch):
        place = max(range(begin, min(begin + stretch, len(times))), key=lambda one: values[one])
        points.append((times[place], values[place]))
    return points


class _Memory:
    """A run's memory at few enough points to draw, the last of all among them."""

    def __init__(self, memory: Json) -> None:
        self._memory = memory
        count = len(memory["at_us"])
        self._places = [*range(0, count - 1, -(-count // MAX_POINTS)), count - 1]
        self.times = self.column("at_us", 1e6)

    def column(self, name: str, unit: float = 1.0) -> list[float]:
        return [self._memory[name][place] / unit for place in self._places]

    def peak(self) -> float:
        """MiB of all states together."""
        columns = (self._memory[f"{state}_bytes"] for state in MEMORY_STATES)
        return max(map(sum, zip(*columns, strict=True))) / _MIB
