"""Plots as inline SVG: no library, no script, nothing to load; colours come from the page's CSS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Axis", "Series", "forest", "lines", "log_ticks", "stacked", "ticks"]

_WIDTH, _HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 26, 40
_ROW = 22

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """``top`` None: as far as the data goes. ``is_log``: decades; values must be above 0."""

    title: str
    top: float | None = None
    is_log: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """``color``: the number of the CSS class ``c0``, ``c1``, ..."""

    label: str
    points: Points
    color: int
    has_dots: bool = False


@dataclass(frozen=True, slots=True)
class _Frame:
    """From values to pixels."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float
    is_log_x: bool = False
    width: int = _WIDTH
    height: int = _HEIGHT
    left: int = _LEFT

    def x(self, value: float) -> float:
        low, high = self.low_x, self.high_x
        if self.is_log_x:
            value, low, high = (math.log10(max(one, low)) for one in (value, low, high))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.left + share * (self.width - self.left - _RIGHT)

    def y(self, value: float) -> float:
        span = self.high_y - self.low_y
        share = (value - self.low_y) / span if span else 0.5
        return self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round values from ``low`` to ``high``."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(one for one in (1, 2, 5, 10) if one * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every decade; the decades alone where they are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) <= 4 else (1,)
    marks = [step * 10.0**decade for decade in decades for step in steps]
    return [mark for mark in marks if low * 0.999 <= mark <= high * 1.001]


def lines(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """A line for each series; one without points is left out."""
    shown = [one for one in series if one.points]
    if not shown:
        return ""
    frame = _frame(x, y, [point for one in shown for point in one.points])
    body = [_axes(frame, title, x, y)]
    for one in shown:
        path = " ".join(f"{frame.x(a):.1f},{frame.y(b):.1f}" for a, b in one.points)
        body.append(f'<polyline class="line c{one.color}" points="{path}"/>')
        if one.has_dots:
            body += [
                f'<circle class="dot c{one.color}" r="3" '
                f'cx="{frame.x(a):.1f}" cy="{frame.y(b):.1f}"/>'
                for a, b in one.points
            ]
    return _svg(frame, title, body) + _legend([(one.label, one.color) for one in shown])


def stacked(
    title: str,
    x: Axis,
    y: Axis,
    times: Sequence[float],
    layers: Sequence[tuple[str, Sequence[float]]],
) -> str:
    """Areas on top of each other, in the order of ``layers``; colours ``s0``, ``s1``, ..."""
    totals = [sum(column) for column in zip(*(values for _, values in layers), strict=True)]
    frame = _frame(x, y, list(zip(times, totals, strict=True)))
    body = [_axes(frame, title, x, y)]
    below = [0.0] * len(times)
    for place, (_, values) in enumerate(layers):
        above = [low + value for low, value in zip(below, values, strict=True)]
        forth = [f"{frame.x(t):.1f},{frame.y(v):.1f}" for t, v in zip(times, above, strict=True)]
        back = [f"{frame.x(t):.1f},{frame.y(v):.1f}" for t, v in zip(times, below, strict=True)]
        body.append(f'<polygon class="s{place}" points="{" ".join(forth + back[::-1])}"/>')
        below = above
    return _svg(frame, title, body) + _legend(
        [(name, place) for place, (name, _) in enumerate(layers)], kind="s"
    )


def forest(title: str, x_title: str, rows: Sequence[tuple[str, float, float, float, str]]) -> str:
    """Ratios with their intervals around 1, on a logarithmic axis.

    A row: label, ratio, low, high, CSS class (``better``, ``worse`` or ``neutral``). Intervals
    that leave the picture end in an arrow.
    """
    inside = [value for _, ratio, low, high, _ in rows for value in (ratio, low, high)]
    inside = [value for value in inside if 0.2 <= value <= 5.0] or [1.0]
    low_x, high_x = min(*inside, 1 / 1.05) / 1.02, max(*inside, 1.05) * 1.02
    height = _TOP + _BOTTOM + _ROW * len(rows)
    frame = _Frame(low_x, high_x, 0.0, 1.0, True, _WIDTH, height, 150)
    body = [f'<text class="title" x="{frame.left}" y="16">{escape(title)}</text>']
    body += _x_axis(frame, ticks(low_x, high_x, 4), x_title)
    body.append(
        f'<line class="one" x1="{frame.x(1):.1f}" x2="{frame.x(1):.1f}" y1="{_TOP}" '
        f'y2="{height - _BOTTOM}"/>'
    )
    for place, (label, ratio, low, high, kind) in enumerate(rows):
        y = _TOP + _ROW * (place + 0.5)
        left, right = (min(max(value, low_x), high_x) for value in (low, high))
        body.append(
            f'<text class="label" x="{frame.left - 8}" y="{y + 4}" text-anchor="end">'
            f"{escape(label)}</text>"
            f'<line class="interval {kind}" x1="{frame.x(left):.1f}" x2="{frame.x(right):.1f}" '
            f'y1="{y}" y2="{y}"/>'
        )
        if low_x <= ratio <= high_x:
            body.append(f'<circle class="point {kind}" cx="{frame.x(ratio):.1f}" cy="{y}" r="4"/>')
        for value, bound, sign in ((low, low_x, "◂"), (high, high_x, "▸")):
            if (value < bound) if sign == "◂" else (value > bound):
                body.append(
                    f'<text class="arrow {kind}" x="{frame.x(bound):.1f}" y="{y + 4.5}" '
                    f'text-anchor="middle">{sign}</text>'
                )
    return _svg(frame, title, body)


def _frame(x: Axis, y: Axis, points: Points) -> _Frame:
    xs, ys = [a for a, _ in points], [b for _, b in points]
    low_x = min(xs) if x.is_log else min(0.0, *xs)
    high_x = x.top if x.top is not None else max(xs)
    high_y = y.top if y.top is not None else max(ys)
    return _Frame(low_x, max(high_x, low_x), 0.0, high_y or 1.0, x.is_log)


def _axes(frame: _Frame, title: str, x: Axis, y: Axis) -> str:
    body = [f'<text class="title" x="{frame.left}" y="16">{escape(title)}</text>']
    for mark in ticks(frame.low_y, frame.high_y):
        height = frame.y(mark)
        body.append(
            f'<line class="grid" x1="{frame.left}" x2="{frame.width - _RIGHT}" '
            f'y1="{height:.1f}" y2="{height:.1f}"/>'
            f'<text class="tick" x="{frame.left - 6}" y="{height + 3.5:.1f}" '
            f'text-anchor="end">{mark:,.6g}</text>'
        )
    middle = (_TOP + frame.height - _BOTTOM) / 2
    body.append(
        f'<text class="axis" transform="translate(13 {middle}) rotate(-90)" '
        f'text-anchor="middle">{escape(y.title)}</text>'
    )
    marks = (log_ticks if x.is_log else ticks)(frame.low_x, frame.high_x)
    body += _x_axis(frame, marks, x.title)
    return "".join(body)


def _x_axis(frame: _Frame, marks: Sequence[float], title: str) -> list[str]:
    bottom = frame.height - _BOTTOM
    body = [
        f'<line class="grid" x1="{frame.x(mark):.1f}" x2="{frame.x(mark):.1f}" '
        f'y1="{_TOP}" y2="{bottom}"/>'
        f'<text class="tick" x="{frame.x(mark):.1f}" y="{bottom + 14}" '
        f'text-anchor="middle">{mark:.6g}</text>'
        for mark in marks
    ]
    middle = (frame.left + frame.width - _RIGHT) / 2
    body.append(
        f'<text class="axis" x="{middle}" y="{frame.height - 6}" text-anchor="middle">'
        f"{escape(title)}</text>"
    )
    return body


def _svg(frame: _Frame, title: str, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{"".join(body)}</svg>'
    )


def _legend(entries: Sequence[tuple[str, int]], kind: str = "c") -> str:
    items = "".join(
        f'<span><i class="key {kind}{color}"></i>{escape(label)}</span>' for label, color in entries
    )
    return f'<div class="legend">{items}</div>'
